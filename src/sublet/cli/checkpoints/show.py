"""`sublet checkpoint show`: what is in one version, where its copies are, and which versions there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.checkpoints.checkpoint import Manifest, TensorEntry
from sublet.core.errors import Damaged, NotFound, SubletError
from sublet.core.values import format_duration, format_size
from sublet.json_shapes import seconds
from sublet.ports.store import Replica
from sublet.settings import load_settings
from sublet.store.upkeep.lineage import FoundVersion
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
    """What one version holds: its tensors, what is new in it, where its copies are, and its history."""
    with checkpoints() as store:
        found = store.lineage.find(name, version_of(version) if version is not None else None)
        history = _history(store.lineage.history(name), found)
        replicas = store.replicas
    head = found.versions.head
    ages = _ages(replicas)
    # The ledger knows when the head was committed; of older versions the replicas know when they were
    # written.
    ages[head.digest] = max(0, open_ledger(load_settings()).now() - head.committed_at)
    tags: dict[int, list[str]] = {}
    for tag, kept in sorted(found.versions.tags.items()):
        tags.setdefault(kept.version, []).append(tag)
    shown = _Shown(
        found=found,
        history=history,
        new=_new(history),
        ages=ages,
        tags=tags,
        copies=[(r.name, *_copies(r, found.digest, found.manifest)) for r in replicas],
    )
    if as_json:
        print_json(_as_json(shown))
    else:
        _print(shown, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """One version, with what is known of it and of the versions before it."""

    found: FoundVersion
    history: list[FoundVersion]
    new: dict[str, int]  # bytes that the version before has not, by digest
    ages: dict[str, int]  # microseconds, by digest
    tags: dict[int, list[str]]
    copies: list[tuple[str, int, bool]]

    @property
    def tensors(self) -> list[tuple[str, TensorEntry]]:
        manifest = self.found.manifest
        return [(path, manifest.tensors[number]) for path, number in manifest.tensor_paths()]


def _version_json(shown: _Shown, one: FoundVersion) -> dict[str, object]:
    return {
        "version": one.manifest.version,
        "step": one.manifest.step,
        "digest": one.digest,
        "bytes": one.manifest.bytes,
        "bytes_new": shown.new[one.digest],
        "age_seconds": None if (age := shown.ages.get(one.digest)) is None else seconds(age),
        "tags": shown.tags.get(one.manifest.version, []),
    }


def _as_json(shown: _Shown) -> dict[str, object]:
    manifest = shown.found.manifest
    return {
        "name": manifest.name,
        "tenant": shown.found.versions.head.tenant,
        **_version_json(shown, shown.found),
        "schema": manifest.schema,
        "epoch": manifest.epoch,
        "chunks": len(manifest.chunks),
        "packs": list(manifest.packs),
        "versions": [one.manifest.version for one in shown.history],
        "history": [_version_json(shown, one) for one in shown.history],
        "replicas": [{"replica": r, "packs": p, "manifest": m} for r, p, m in shown.copies],
        "tensors": [
            {
                "path": path,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "bytes": manifest.storages[t.storage].size,
            }
            for path, t in shown.tensors
        ],
    }


def _print(shown: _Shown, limit: int) -> None:
    manifest, tags, history = shown.found.manifest, shown.tags, shown.history
    fresh = shown.new[shown.found.digest]
    tagged = f", tagged {', '.join(tags[manifest.version])}" if manifest.version in tags else ""
    click.echo(f"{manifest.name} version {manifest.version}, step {manifest.step}{tagged}")
    click.echo(f"digest {shown.found.digest}")
    click.echo(
        f"{size(manifest.bytes)} in {len(manifest.chunks)} chunks: {size(fresh)} new "
        f"{_bar(fresh, manifest.bytes)} "
        f"{size(manifest.bytes - fresh)} shared with the version before"
    )
    click.echo()
    print_table(
        ["REPLICA", "COPY"],
        [(r, _copy_words(packs, len(manifest.packs), there)) for r, packs, there in shown.copies],
        empty="no replicas",
    )
    click.echo()
    print_table(
        ["VERSION", "STEP", "SIZE", "NEW", "AGE", "TAGS", "DIGEST"],
        [
            (
                one.manifest.version,
                one.manifest.step,
                size(one.manifest.bytes),
                size(shown.new[one.digest]),
                format_duration(shown.ages[one.digest]) if one.digest in shown.ages else "-",
                ", ".join(tags.get(one.manifest.version, [])) or "-",
                one.digest[:16],
            )
            for one in history[:limit]
        ],
        empty="no versions",
    )
    _more(len(history), limit)
    click.echo()
    print_table(
        ["TENSOR", "TYPE", "SHAPE", "SIZE"],
        [
            (path, t.dtype, "×".join(map(str, t.shape)) or "-", size(manifest.storages[t.storage].size))
            for path, t in shown.tensors[:limit]
        ],
        empty="no tensors in it",
    )
    _more(len(shown.tensors), limit)


def _more(count: int, limit: int) -> None:
    if count > limit:
        click.echo(f"… and {count - limit} more (--limit)")


def _history(walk: Iterator[FoundVersion], found: FoundVersion) -> list[FoundVersion]:
    """As far as it reads; a head that does not must not hide the version that was asked for."""
    history: list[FoundVersion] = []
    with contextlib.suppress(Damaged, NotFound):
        for each in walk:
            history.append(each)
    if not any(f.digest == found.digest for f in history):
        history.append(found)
    return sorted(history, key=lambda f: f.manifest.version, reverse=True)


def _new(history: list[FoundVersion]) -> dict[str, int]:
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
