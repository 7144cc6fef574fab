"""`sublet checkpoint show`: what is in one version, where its copies are, and which versions there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.checkpoint import Manifest
from sublet.core.errors import Damaged, NotFound, SubletError
from sublet.core.values import format_duration, format_size
from sublet.ports.store import Replica
from sublet.settings import load_settings
from sublet.store.lineage import Found
from sublet.wiring import checkpoints, open_ledger


def version_of(text: str) -> int | str:
    """A number is a version, anything else a tag."""
    return int(text) if text.isascii() and text.isdigit() else text


def size(value: int) -> str:
    return format_size(value) if value else "0"


@click.command("show", epilog="Example:  sublet checkpoint show spot-resnet --version 3")
@click.argument("name")
@click.option("--version", default=None, help="An older one, by number or tag; the newest without it.")
@click.option("--limit", default=40, show_default=True, help="The most tensors and versions to list.")
@json_option
def show(name: str, version: str | None, limit: int, as_json: bool) -> None:
    """What is in one: tensors, what is new in it, where its copies are, its history."""
    with checkpoints() as store:
        found = store.lineage.find(name, version_of(version) if version is not None else None)
        history = _history(store.lineage.history(name), found)
        replicas = store.replicas
    manifest, head = found.manifest, found.versions.head
    ages = _ages(replicas)
    # The ledger knows when the head was committed; of older versions the replicas know when they were written.
    ages[head.digest] = max(0, open_ledger(load_settings()).now() - head.committed_at)
    new = _new(history)
    tags: dict[int, list[str]] = {}
    for tag, kept in sorted(found.versions.tags.items()):
        tags.setdefault(kept.version, []).append(tag)
    copies = [(r.name, *_copies(r, found.digest, manifest)) for r in replicas]
    tensors = [(path, manifest.tensors[number]) for path, number in manifest.tensor_paths()]
    rows = [
        {
            "version": f.manifest.version,
            "step": f.manifest.step,
            "digest": f.digest,
            "bytes": f.manifest.bytes,
            "bytes_new": new[f.digest],
            "age_us": ages.get(f.digest),
            "tags": tags.get(f.manifest.version, []),
        }
        for f in history
    ]
    if as_json:
        print_json(
            {
                "name": manifest.name,
                "tenant": head.tenant,
                "version": manifest.version,
                "step": manifest.step,
                "digest": found.digest,
                "schema": manifest.schema,
                "epoch": manifest.epoch,
                "age_us": ages.get(found.digest),
                "tags": tags.get(manifest.version, []),
                "bytes": manifest.bytes,
                "bytes_new": new[found.digest],
                "chunks": len(manifest.chunks),
                "packs": list(manifest.packs),
                "versions": [f.manifest.version for f in history],
                "history": rows,
                "replicas": [{"replica": r, "packs": p, "manifest": m} for r, p, m in copies],
                "tensors": [
                    {
                        "path": path,
                        "dtype": t.dtype,
                        "shape": list(t.shape),
                        "bytes": manifest.storages[t.storage].size,
                    }
                    for path, t in tensors
                ],
            }
        )
        return
    fresh = new[found.digest]
    marks = f", tagged {', '.join(tags[manifest.version])}" if manifest.version in tags else ""
    click.echo(f"{manifest.name} version {manifest.version}, step {manifest.step}{marks}")
    click.echo(f"digest {found.digest}")
    click.echo(
        f"{size(manifest.bytes)} in {len(manifest.chunks)} chunks: {size(fresh)} new {_bar(fresh, manifest.bytes)} "
        f"{size(manifest.bytes - fresh)} shared with the version before"
    )
    click.echo()
    print_table(
        ["REPLICA", "COPY"],
        [(r, _copy_words(packs, len(manifest.packs), there)) for r, packs, there in copies],
        empty="no replicas",
    )
    click.echo()
    print_table(
        ["VERSION", "STEP", "SIZE", "NEW", "AGE", "TAGS", "DIGEST"],
        [
            (
                f.manifest.version,
                f.manifest.step,
                size(f.manifest.bytes),
                size(new[f.digest]),
                format_duration(ages[f.digest]) if f.digest in ages else "-",
                ", ".join(tags.get(f.manifest.version, [])) or "-",
                f.digest[:16],
            )
            for f in history[:limit]
        ],
        empty="no versions",
    )
    _more(len(history), limit)
    click.echo()
    print_table(
        ["TENSOR", "TYPE", "SHAPE", "SIZE"],
        [
            (path, t.dtype, "×".join(map(str, t.shape)) or "-", size(manifest.storages[t.storage].size))
            for path, t in tensors[:limit]
        ],
        empty="no tensors in it",
    )
    _more(len(tensors), limit)


def _more(count: int, limit: int) -> None:
    if count > limit:
        click.echo(f"… and {count - limit} more (--limit)")


def _history(walk: Iterator[Found], found: Found) -> list[Found]:
    """As far as it reads; a head that does not must not hide the version that was asked for."""
    history: list[Found] = []
    with contextlib.suppress(Damaged, NotFound):
        for each in walk:
            history.append(each)
    if not any(f.digest == found.digest for f in history):
        history.append(found)
    return sorted(history, key=lambda f: f.manifest.version, reverse=True)


def _new(history: list[Found]) -> dict[str, int]:
    """Of each version, what the one before it in this list has not."""
    new = {}
    for this, before in zip(history, [*history[1:], None], strict=True):
        known = {c.digest for c in before.manifest.chunks} if before else set()
        new[this.digest] = sum(c.span.size for c in this.manifest.chunks if c.digest not in known)
    return new


def _ages(replicas: tuple[Replica, ...]) -> dict[str, int]:
    for replica in replicas:
        try:
            return {name: int(max(0.0, age) * 1e6) for name, age in replica.manifests() if age >= 0}
        except (OSError, SubletError):
            continue
    return {}


def _copies(replica: Replica, digest: str, manifest: Manifest) -> tuple[int, bool]:
    """How many of its packs a replica has, and whether it has the manifest. -1: it does not answer."""
    try:
        there = replica.get_manifest(digest) is not None
        return sum(replica.has_pack(pack) for pack in manifest.packs), there
    except (OSError, SubletError):
        return -1, False


def _copy_words(packs: int, of: int, manifest: bool) -> str:
    if packs < 0:
        return "does not answer"
    if packs == of and manifest:
        return f"all {of} packs (not read: 'sublet checkpoint verify' does)"
    return f"{packs} of {of} packs{'' if manifest else ', no manifest'}: 'sublet checkpoint repair' mends it"


def _bar(part: int, whole: int, width: int = 20) -> str:
    filled = round(width * part / whole) if whole else 0
    return "█" * filled + "░" * (width - filled)
