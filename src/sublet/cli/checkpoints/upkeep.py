"""`sublet checkpoint rollback|fork|tag|sweep|scrub|rebuild`: what operators do to versions and to their
copies."""

from __future__ import annotations

import click

from sublet.cli.checkpoints.show import size, version_of
from sublet.cli.leases.operate import actor
from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.progress import progress_bar
from sublet.core.checkpoints.retention import Retention
from sublet.core.errors import BadInput, Damaged
from sublet.core.values import parse_duration, parse_size
from sublet.json_shapes import seconds
from sublet.settings import load_settings
from sublet.store.upkeep.scrubbing import Copy
from sublet.store.upkeep.sweeping import Swept
from sublet.wiring import checkpoints

dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


@click.command(epilog="Example:  sublet checkpoint rollback spot-resnet 41")
@click.argument("name")
@click.argument("version")
@dry_run_option
@json_option
def rollback(name: str, version: str, dry_run: bool, as_json: bool) -> None:
    """Make VERSION (a number or a tag) the newest state again, as a new version. Nothing is deleted."""
    with checkpoints() as store:
        if dry_run:
            found = store.lineage.find(name, version_of(version))
            head = found.versions.head
            told = {
                "name": name,
                "version": head.version + 1,
                "source": found.manifest.version,
                "step": found.manifest.step,
                "dry_run": True,
            }
            words = f"would make version {head.version + 1} of {name} from version {found.manifest.version}"
        else:
            moved = store.rollback(name, version_of(version), actor=actor())
            told = {
                "name": name,
                "version": moved.version,
                "source": moved.source,
                "step": moved.step,
                "digest": moved.digest,
                "forgotten": moved.forgotten,
            }
            state = f"the state of version {moved.source}, step {moved.step}"
            words = f"{name} is at version {moved.version}: {state}"
    if as_json:
        print_json(told)
        return
    click.echo(words)
    click.echo(
        f"steps after {told['step']} will run again: what they recorded in the ledger is forgotten, what "
        "they did "
        "outside it is not undone. A process that still holds the newer state gets HeadMoved when it saves."
    )


@click.command(epilog="Example:  sublet checkpoint fork spot-resnet spot-resnet-lr3 --version best")
@click.argument("name")
@click.argument("new_name")
@click.option("--version", default=None, help="Begin with this one, by number or tag; the newest without it.")
@json_option
def fork(name: str, new_name: str, version: str | None, as_json: bool) -> None:
    """Begin job NEW_NAME with a version of job NAME. No bytes are copied; both go their own way from
    there."""
    with checkpoints() as store:
        wanted = version_of(version) if version is not None else None
        moved = store.fork(name, new_name, wanted, actor=actor())
    if as_json:
        print_json(
            {
                "name": new_name,
                "version": moved.version,
                "from": name,
                "source": moved.source,
                "step": moved.step,
                "digest": moved.digest,
            }
        )
    else:
        click.echo(f"{new_name} begins with version {moved.source} of {name}, step {moved.step}")


@click.command(epilog="Example:  sublet checkpoint tag spot-resnet 41 best")
@click.argument("name")
@click.argument("version")
@click.argument("tag")
@click.option("--remove", is_flag=True, help="Take the tag away; VERSION must be where it is.")
@json_option
def tag(name: str, version: str, tag: str, remove: bool, as_json: bool) -> None:
    """Keep VERSION under a name. A tagged version is never dropped; a tag that exists moves."""
    with checkpoints() as store:
        if remove:
            kept = store.versions(name).tags.get(tag)
            if kept is not None and version_of(version) not in (kept.version, tag):
                raise BadInput(
                    f"{tag} is at version {kept.version} of {name}, not at {version}; nothing was changed"
                )
            store.untag(name, tag, actor=actor())
        else:
            store.tag(name, version_of(version), tag, actor=actor())
        tags = {k: v.version for k, v in sorted(store.versions(name).tags.items())}
    if as_json:
        print_json({"name": name, "tags": tags})
    elif remove:
        click.echo(f"{name} has no tag {tag} any more; its version stays as long as retention keeps it")
    else:
        click.echo(f"{name} version {tags[tag]} is kept as {tag}")


@click.command(epilog="Example:  sublet checkpoint sweep --keep-last 5 --keep-every 100 --dry-run")
@click.argument("name", required=False)
@click.option("--keep-last", default=0, metavar="K", help="Keep the newest K versions of each job.")
@click.option("--keep-every", default=0, metavar="N", help="Keep versions whose number is a multiple of N.")
@click.option(
    "--older-than",
    default="1d",
    show_default=True,
    help="Delete nothing younger. At least 12h: a save may take that long.",
)
@click.option("--nobody-is-saving", is_flag=True, help="Allow a smaller --older-than: no save is under way.")
@dry_run_option
@json_option
def sweep(
    name: str | None,
    keep_last: int,
    keep_every: int,
    older_than: str,
    nobody_is_saving: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Drop versions (of NAME, or of every job), then delete what no version needs.

    The newest and tagged versions are always kept. Without --keep-last or --keep-every no version is dropped:
    only what saves that died left behind is deleted.
    """
    rule = Retention(last=keep_last, every=keep_every)
    with checkpoints() as store, progress_bar() as progress:
        swept = store.sweep(
            name,
            keep=rule,
            older_than_us=parse_duration(older_than, what="older-than"),
            nobody_is_saving=nobody_is_saving,
            dry_run=dry_run,
            actor=actor(),
            progress=progress,
        )
    if as_json:
        print_json(_swept_json(swept, dry_run))
        return
    dropping = [(job, v) for job, verdicts in swept.verdicts.items() for v in verdicts]
    if not rule.keeps_all:
        print_table(
            ["NAME", "VERSION", "", "WHY"],
            [(job, v.version, "keep" if v.keep else "drop", v.reason) for job, v in dropping],
            empty="no versions",
        )
    by_replica: dict[str, list[int]] = {}
    for item in swept.removed:
        by_replica.setdefault(item.replica, []).append(item.bytes)
    for replica, sizes in sorted(by_replica.items()):
        click.echo(
            f"{'would delete' if dry_run else 'deleted'} on {replica}: {len(sizes)} files, {size(sum(sizes))}"
        )
    for replica, why in sorted(swept.skipped.items()):
        click.echo(f"NOT swept: {replica}: {why}")
    if not swept.removed:
        click.echo(f"nothing to delete that is older than {older_than}")
    click.echo(f"needed and kept: {swept.manifests} versions in {swept.packs} packs")


def _swept_json(swept: Swept, dry_run: bool) -> object:
    return {
        "dry_run": dry_run,
        "versions": {
            job: [{"version": v.version, "keep": v.keep, "why": v.reason} for v in verdicts]
            for job, verdicts in swept.verdicts.items()
        },
        "removed": [
            {
                "replica": g.replica,
                "kind": g.kind,
                "name": g.name,
                "bytes": g.bytes,
                "age_seconds": seconds(g.age_us),
            }
            for g in swept.removed
        ],
        "bytes": swept.bytes,
        "skipped": swept.skipped,
        "needed": {"versions": swept.manifests, "packs": swept.packs},
    }


def _copy_json(copy: Copy) -> dict[str, str]:
    return {"replica": copy.replica, "kind": copy.kind, "name": copy.name, "state": copy.state}


@click.command(epilog="Example:  sublet checkpoint scrub --rate 200MB --repair")
@click.argument("name", required=False)
@click.option("--repair", is_flag=True, help="Replace what is missing or bad from a good copy.")
@click.option(
    "--rate", default=None, metavar="SIZE", help="Read at most this much in a second, such as 200MB."
)
@json_option
def scrub(name: str | None, repair: bool, rate: str | None, as_json: bool) -> None:
    """Read every copy of everything that is needed, and compare it with its digest.

    Exit code 0: every copy is good, or was made so. 74: some copy is not, or something is lost.
    """
    with checkpoints() as store, progress_bar(sizes=True) as progress:
        done = store.scrub(
            name,
            repair=repair,
            bytes_per_second=parse_size(rate, what="rate") if rate is not None else 0,
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "copies": done.copies,
                "bytes": done.bytes,
                "found": [_copy_json(c) for c in done.found],
                "left": [_copy_json(c) for c in done.left],
                "unreadable": done.unreadable,
                "lost": done.health.lost,
                "repaired": done.health.repaired,
            }
        )  # fmt: skip
    else:
        if done.found:
            print_table(
                ["REPLICA", "KIND", "NAME", "STATE"],
                [
                    (c.replica, c.kind, c.name[:16], c.state if c in done.left else f"{c.state}, repaired")
                    for c in done.found
                ],
                empty="",
            )
        for line in [*done.unreadable, *done.health.lost]:
            click.echo(f"LOST: {line}")
        click.echo(f"{done.copies} copies, {size(done.bytes)} read, {len(done.found)} not good")
    if not done.whole:
        lost = len(done.unreadable) + len(done.health.lost)
        raise Damaged(
            f"{len(done.left)} copies are missing or bad"
            + (f", {lost} things have no good copy at all" if lost else "; every state can still be loaded"),
            remedy="bring the named replicas back"
            if repair
            else "run 'sublet checkpoint scrub --repair', with every replica that may have a copy",
        )


@click.command(epilog="Example:  sublet checkpoint rebuild --take-over --dry-run")
@click.option(
    "--forward", is_flag=True, help="Also move heads that exist to newer versions of their own line."
)
@click.option(
    "--take-over", is_flag=True, help="The ledger the replicas belonged to is lost: this one has them now."
)
@click.option(
    "--heads-are-right", is_flag=True, help="After a restore: keep the heads as they are; sweeps may go on."
)
@dry_run_option
@json_option
def rebuild(forward: bool, take_over: bool, heads_are_right: bool, dry_run: bool, as_json: bool) -> None:
    """Bring back the heads of a lost ledger from what is on the replicas.

    The newest whole version of each job becomes its head. A head that exists is never moved back, and not at
    all without --forward. Tags, leases and effects were in the ledger alone.
    """
    with checkpoints() as store, progress_bar() as progress:
        done = store.rebuild(
            dry_run=dry_run,
            forward=forward,
            take_over=take_over,
            heads_are_right=heads_are_right,
            tenant=load_settings()["tenant"],
            actor=actor(),
            progress=progress,
        )
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "jobs": [
                    {
                        "name": j.name,
                        "tenant": j.tenant,
                        "version": j.version,
                        "step": j.step,
                        "digest": j.digest,
                        "action": j.action,
                        "certain": j.certain,
                        "versions": list(j.versions),
                        "passed_over": list(j.passed_over),
                    }
                    for j in done.jobs
                ],
                "manifests": done.manifests,
                "unreadable": done.unreadable,
                "unreachable": done.unreachable,
                "tenants": done.tenants,
                "heads_current": done.heads_current,
            }
        )
        return
    print_table(
        ["NAME", "TENANT", "VERSION", "STEP", "WHAT", "NOTE"],
        [
            (
                j.name,
                j.tenant,
                j.version or "-",
                j.step or "-",
                j.action,
                _note(j.action, j.certain, j.passed_over),
            )
            for j in done.jobs
        ],
        empty="no checkpoint is on the replicas",
    )
    for tenant in done.tenants:
        click.echo(f"tenant {tenant} {'would be' if dry_run else 'was'} added, with default limits")
    if not dry_run and any(j.action in ("adopted", "forwarded") for j in done.jobs):
        click.echo("'sublet checkpoint scrub --repair' gives every replica a copy of what was found")
    for replica, why in sorted(done.unreachable.items()):
        click.echo(f"NOT read: {replica}: {why}")
    click.echo(
        f"{done.manifests} manifests read, {done.unreadable} did not "
        f"verify{'; nothing was changed' if dry_run else ''}"
    )


def _note(action: str, certain: bool, passed_over: tuple[int, ...]) -> str:
    notes = {
        "newer": "the replicas have a newer version: --forward moves the head",
        "diverged": "the replicas have a newer version of another line; the head was left",
        "lost": "no version of it is whole",
    }
    said = [notes[action]] if action in notes else []
    if action in ("adopted", "forwarded") and not certain:
        said.append("the newest whole one; it may have been saved and not committed")
    if passed_over:
        said.append(f"not whole: {', '.join(map(str, passed_over))}")
    return "; ".join(said) or "-"


COMMANDS = (rollback, fork, tag, sweep, scrub, rebuild)
