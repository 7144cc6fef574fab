"""Which system calls a tenant's worker does without.

Rules of this file:
- Refused is what reaches into other processes, into the kernel or around files' modes, and what no training,
  no data loader and no ordinary program needs. A flaw of the kernel in one of them cannot be tried from a
  session then, whatever its user may do.
- A refusal is EPERM, which programs know from any container. `clone3` hides its flags in memory where a
  filter cannot look: it is ENOSYS, and every C library then asks by `clone`.
- Calls of another architecture or calling convention are refused as a whole: their numbers mean other things.
- io_uring is refused because what it does passes by every filter. Libraries that use it fall back.
- `userfaultfd` stays for faults of its own code, by which a worker learns what was written to. Not for those
  of the kernel on its behalf, whose handling a program could hold up at will.
- `pidfd_getfd` stays: torch shares memory of a GPU between its own processes by it, and the kernel asks for
  the same rights as for tracing.
"""

from __future__ import annotations

REFUSED = {
    "other processes": ("ptrace", "process_vm_readv", "process_vm_writev", "kcmp"),
    "keyrings": ("add_key", "request_key", "keyctl"),
    "the kernel's own programs": ("bpf", "perf_event_open"),
    "files without a path": ("open_by_handle_at",),
    "mounts and roots": (
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "open_tree",
        "move_mount",
        "fsopen",
        "fsconfig",
        "fsmount",
        "fspick",
        "mount_setattr",
    ),
    "namespaces of others": ("setns",),
    "the machine": (
        "kexec_load",
        "kexec_file_load",
        "init_module",
        "finit_module",
        "delete_module",
        "reboot",
        "swapon",
        "swapoff",
        "acct",
        "syslog",
    ),
    "calls past a filter": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
}
#: Refused when its first argument has one of these bits: new namespaces of every kind.
REFUSED_NAMESPACES = ("unshare", "clone")
#: CLONE_NEWTIME is not among them for `clone`, where its bit belongs to the signal of the child's end.
NAMESPACE_BITS = {"unshare": 0x7E020080, "clone": 0x7E020000}
#: Refused unless its first argument has this bit.
ONLY_WITH = {"userfaultfd": 1}
UNKNOWN_TO_IT = ("clone3",)
#: Sockets that reach a machine's host past every rule about addresses.
REFUSED_SOCKET_FAMILIES = {"vsock": 40}
