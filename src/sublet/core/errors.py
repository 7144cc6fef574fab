"""The error tree, by what the caller can do next.

Rules of this file:
- A family says what to do: `Refused` wait or ask for less, `LeaseLost` reacquire, `Stale` reload or stop,
  `NotDurable` it was not saved, `DeviceFault` go elsewhere, `Disconnected` retry with a limit,
  `BadInput` correct the request, `Misconfigured` correct the installation, `Unauthorized` use another token,
  `ResumeDiffers` save what was left out.
- `InvariantBroken` is our bug. Nothing catches it.
- A class's docstring is its default message; `code` is stable across releases and surfaces; `remedy` is the
  next thing to do. A message never holds a secret, a path inside the service, or a connection string.
"""

from __future__ import annotations

from typing import ClassVar


class SubletError(Exception):
    """Something went wrong in sublet."""

    code: ClassVar[str] = "error"
    remedy: str = "run 'sublet doctor' to check every part"

    def __init__(self, message: str = "", *, remedy: str = "") -> None:
        super().__init__(message or (self.__doc__ or "").strip())
        if remedy:
            self.remedy = remedy

    @property
    def message(self) -> str:
        return str(self.args[0])


class BadInput(SubletError, ValueError):
    """The request itself is wrong; nothing was changed."""

    code = "bad_input"
    remedy = "correct the value and try again"


class NotFound(BadInput):
    """There is no such object; nothing was changed."""

    code = "not_found"
    remedy = "list what exists with 'sublet ps', 'sublet gpus' or 'sublet tenant ls'"


class NothingSaved(NotFound):
    """Nothing was checkpointed there yet; nothing was changed."""

    code = "nothing_saved"
    remedy = "make a value and checkpoint it first: sublet.Durable(value, block).checkpoint()"


class CallFailed(BadInput):
    """The function raised an exception in the worker that cannot be sent back; the worker is still usable."""

    code = "call_failed"
    remedy = "its traceback is in the cause; correct the function and call again"


class NotJson(BadInput):
    """An item or a result is not made of texts, numbers, lists and dicts; nothing was stored."""

    code = "not_json"
    remedy = (
        "send what JSON can hold: array.tolist(), str(path); put bytes in a file or a checkpoint and "
        "send its name"
    )


class TooLarge(BadInput):
    """An item or a result is larger than a queue takes; nothing was stored."""

    code = "too_large"
    remedy = "put the bytes in a file, a bucket or a checkpoint, and send its name"


class ItemFailed(BadInput):
    """An item failed every try it has; it is kept in the dead-letter list with its last error."""

    code = "item_failed"
    remedy = "correct the function, then 'sublet queue redrive QUEUE'; the results of the others are kept"


class CannotTravel(BadInput):
    """A variable the cell uses cannot be sent to the GPU worker; nothing was run."""

    code = "cannot_travel"
    remedy = "make it inside the cell, or send what it is made from; --in names exactly what the cell needs"


class Misconfigured(SubletError):
    """The installation or its settings cannot work; nothing was changed."""

    code = "misconfigured"
    remedy = "run 'sublet doctor' and correct what it marks"


class MissingExtra(Misconfigured):
    """A part that is installed separately is missing."""

    code = "missing_extra"


class SchemaMismatch(Misconfigured):
    """The ledger was written by another version of sublet; nothing was changed."""

    code = "schema_mismatch"


class LedgerFromThePast(Misconfigured):
    """The ledger is not the newest one that was here; it can be read, and nothing was changed."""

    code = "ledger_from_the_past"
    remedy = (
        "put the newest ledger back, with its -wal file; if there is none, 'sublet migrate --restored' ends "
        "the leases this one knows and goes on with it"
    )


class WardenRunning(Misconfigured):
    """A warden already runs on this host."""

    code = "warden_running"
    remedy = "nothing to do: one is enough"


class NotIsolated(Misconfigured):
    """This host cannot keep the tenant apart from others, so nothing of it was started."""

    code = "not_isolated"
    remedy = "the session host's log says what is missing; 'sublet doctor' says what this host can do"


class Refused(SubletError):
    """No GPU could be leased."""

    code = "refused"
    remedy = "wait for a GPU with --wait 30m, or ask for less"


class NoCapacity(Refused):
    """No device has that much free now."""

    code = "no_capacity"


class NeverFits(Refused):
    """No device of this pool could ever hold the request."""

    code = "never_fits"
    remedy = "ask for less VRAM or fewer devices; 'sublet gpus' shows what there is"


class DeviceTaken(NeverFits):
    """Another ledger of this machine grants the device, so this one does not."""

    code = "device_taken"
    remedy = (
        "share one ledger: set SUBLET_LEDGER to the same address for everybody on this machine; or wait: a "
        "warden without leases gives its devices back after a minute"
    )


class QuotaReached(Refused):
    """The tenant's quota does not allow it."""

    code = "quota_reached"
    remedy = "release a lease, ask for less, or ask the operator for a larger quota"


class WaitlistFull(Refused):
    """The waitlist is full."""

    code = "waitlist_full"
    remedy = "try again in a few minutes"


class WaitTimedOut(Refused):
    """No GPU became free within the time the request was willing to wait."""

    code = "wait_timed_out"
    remedy = "wait longer, ask for less, or use a higher tier"


class TooMany(Refused):
    """More requests came than one tenant or address may send; nothing was done."""

    code = "too_many"
    remedy = "wait as long as Retry-After says, then try again"


class BlockHeld(Refused):
    """Somebody holds this block; nothing was changed."""

    code = "block_held"
    remedy = "wait until its lease is over, or end the process that holds it"


class LeaseLost(SubletError):
    """The lease has ended; what was committed is safe, what was not is gone."""

    code = "lease_lost"
    remedy = "acquire a new lease and resume from the last commit"


class LeaseNotActive(LeaseLost):
    """The lease is not active, so no work was started."""

    code = "lease_not_active"


class WorkerLost(LeaseLost):
    """The leased worker ended under the call; what it had committed is safe, the call has no result."""

    code = "worker_lost"
    remedy = (
        "call again: a new lease and a new worker are taken; the function must not mind having been "
        "begun before"
    )

    def __init__(
        self,
        message: str = "",
        *,
        begun: bool = True,
        with_host: bool = False,
        reason: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.begun = begun  # False: the call never reached the worker, so repeating it is safe
        self.with_host = with_host  # True: its host is gone or silent, which no call is to blame for
        self.reason = reason or message  # what ended it, without what follows from it


class GpuSessionEnded(LeaseLost):
    """GPU session ended. Rerun this cell to reacquire."""

    code = "gpu_session_ended"
    remedy = "rerun the cell: it leases a GPU again; the notebook's own variables are untouched"


class Stale(SubletError):
    """Somebody moved it first; nothing was written."""

    code = "stale"
    remedy = "reload the current state, or stop if another holder owns it"


class Fenced(Stale):
    """A newer holder owns this; the write was refused and changed nothing."""

    code = "fenced"
    remedy = "stop this process: its lease has passed to somebody else"


class HeadMoved(Stale):
    """The head is not at the expected version; nothing was written."""

    code = "head_moved"

    def __init__(self, message: str = "", *, version: int = 0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.version = version


class Elsewhere(Stale):
    """The session lives on another host than the one that was asked; nothing was done."""

    code = "elsewhere"
    remedy = "ask the service of that host: the message names it"


class EffectBusy(Stale):
    """A live holder is working on this effect."""

    code = "effect_busy"
    remedy = "wait for it, or stop: it is being done"


class FingerprintMismatch(Stale):
    """This key was used before with other inputs; the stored outcome was not touched."""

    code = "fingerprint_mismatch"
    remedy = "use a new key for new inputs"


class StaleDelivery(Stale):
    """The item was handed to somebody else meanwhile; this result was refused and overwrote nothing."""

    code = "stale_delivery"
    remedy = "nothing to do: whoever has the item now completes it; a longer visibility makes this rarer"


class JournalBroken(Stale):
    """The journal does not verify."""

    code = "journal_broken"
    remedy = "treat the ledger as tampered with: restore a backup, and keep this file as evidence"


class NotProven(JournalBroken):
    """The ledger does not show that every step and effect was committed once."""

    code = "not_proven"
    remedy = (
        "each fault above names the row that is wrong; keep the ledger as evidence, and put a backup back"
    )


class NotReproduced(Stale):
    """The disturbed run did not end with the state of the undisturbed one."""

    code = "not_reproduced"
    remedy = (
        "give sublet.train everything the run depends on (model, optimizer, data, random generators "
        "of its own)"
    )


class NotDurable(SubletError):
    """It was not saved."""

    code = "not_durable"
    remedy = "nothing was committed; correct the cause and save again"


class Unsavable(BadInput):
    """The state holds something that cannot be saved; nothing was written."""

    code = "unsavable"
    remedy = "save what it is made of: numbers, texts, lists, dicts and tensors"


class ResumeDiffers(SubletError):
    """Steps that were repeated after a resume came out differently; what is committed stays."""

    code = "resume_differs"
    remedy = (
        "what differs is not part of the state: make it a part of it, or compute it from what is saved; with "
        "verify 'never' (SUBLET_VERIFY) it goes on all the same"
    )


class QuorumNotReached(NotDurable):
    """Too few replicas confirmed the save; the head is where it was."""

    code = "quorum_not_reached"
    remedy = (
        "bring the named replicas back, or save with a policy that needs fewer; 'sublet checkpoint "
        "repair' catches them up"
    )


class Damaged(NotDurable):
    """No good copy of a part of this checkpoint is left; nothing of it was returned."""

    code = "damaged"
    remedy = "bring a replica that has a copy back, or load an older version: 'sublet checkpoint ls'"


class Unreached(Damaged):
    """Part of this checkpoint cannot be read: replicas that may have it do not answer; no loss is known."""

    code = "unreached"
    remedy = "bring the named replicas back and try again; 'sublet doctor' tries each of them"


class BlockTooSmall(NotDurable):
    """The value does not fit the block; the checkpoint before is untouched."""

    code = "block_too_small"
    remedy = "take a block of so many blocks with sublet.block(blocks=...), and checkpoint there"


class DeviceFault(SubletError):
    """The device failed."""

    code = "device_fault"
    remedy = "use another device; 'sublet quarantine ls' shows which are withheld"


class OutOfMemory(DeviceFault):
    """The device, or the leased part of it, has not that much memory left; the session is still usable."""

    code = "out_of_memory"
    remedy = "free something, or lease more VRAM"


class KernelTimeout(DeviceFault):
    """A kernel ran longer than the watchdog allows; the device's state is unknown."""

    code = "kernel_timeout"
    remedy = "end this process: its lease will be torn down and the device cleaned"


class CompileFailed(BadInput):
    """The code did not compile; the session is still usable."""

    code = "compile_failed"
    remedy = "correct the source; the compiler's log is in the message"


class NotPlaced(DeviceFault):
    """No node could start the worker; nothing was run, and nothing is held."""

    code = "not_placed"
    remedy = "retry: another node is taken; 'sublet doctor' shows which nodes answer"


class Disconnected(SubletError):
    """The ledger could not be reached, so nothing is assumed to be held."""

    code = "disconnected"
    remedy = "check that the ledger is up with 'sublet doctor', then retry"


class GpuUnavailable(Disconnected):
    """GPU unavailable: the ledger cannot be reached. Nothing was run, and the variables are untouched."""

    code = "gpu_unavailable"
    remedy = "rerun the cell in a moment; 'sublet doctor' says what cannot be reached"


class BrokerDown(Disconnected):
    """The broker could not be reached; what it had not seen acknowledged it keeps."""

    code = "broker_down"
    remedy = "check the broker's address and that it is up; nothing was lost, try again"


class SinkDown(Disconnected):
    """The sink could not be reached; nothing was acknowledged, the items stay with this worker."""

    code = "sink_down"
    remedy = "bring the sink back: results are stored again from where they stopped"


class RankLost(Disconnected):
    """Another rank of this run is gone, so the step it was in cannot be finished."""

    code = "rank_lost"
    remedy = "start all ranks again: they resume at the committed step"


class Unauthorized(SubletError):
    """The token does not open this; nothing was read or changed."""

    code = "unauthorized"
    remedy = (
        "use the whole token as it was printed, or ask the operator for one: sublet tenant token add NAME"
    )


class TokenExpired(Unauthorized):
    """The token has expired; nothing was read or changed."""

    code = "token_expired"
    remedy = "ask the operator for a new one: sublet tenant token add NAME"


class TokenRevoked(Unauthorized):
    """The token was revoked or rotated; nothing was read or changed."""

    code = "token_revoked"
    remedy = "use the token that replaced it, or ask the operator for a new one: sublet tenant token add NAME"


class Forbidden(Unauthorized):
    """The token is good, but not for this; nothing was read or changed."""

    code = "forbidden"
    remedy = "an operator's token opens it: sublet tenant token add NAME --scope operator"


class InvariantBroken(SubletError):
    """A rule that must always hold did not; this is a bug in sublet."""

    code = "invariant_broken"
    remedy = "stop using this ledger and report it with the output of 'sublet journal verify'"


def error_tree() -> tuple[type[SubletError], ...]:
    """Every class of the tree, parents first; surfaces map codes from it and docs list it."""
    found: list[type[SubletError]] = []
    pending: list[type[SubletError]] = [SubletError]
    while pending:
        cls = pending.pop(0)
        found.append(cls)
        pending.extend(cls.__subclasses__())
    return tuple(found)


def error_by_code(code: str) -> type[SubletError]:
    return next((cls for cls in error_tree() if cls.code == code), SubletError)
