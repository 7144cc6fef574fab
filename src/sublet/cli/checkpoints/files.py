"""`sublet checkpoint restore|export|import`: states as files of other programs, and back."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from sublet.cli.checkpoints.show import size, version_of
from sublet.cli.leases.operate import actor
from sublet.cli.output import json_option, print_json
from sublet.cli.progress import progress_bar
from sublet.core.errors import BadInput, MissingExtra
from sublet.leases.request import ensure_tenant
from sublet.settings import load_settings
from sublet.store.load.weights import as_tensors, whole_file
from sublet.wiring import checkpoints, open_ledger

version_option = click.option(
    "--version", default=None, help="An older one, by number or tag; the newest without it."
)
force_option = click.option("--force", is_flag=True, help="Replace FILE if it is there.")


def _free(file: Path, suffixes: tuple[str, ...], force: bool) -> Path:
    if file.suffix not in suffixes:
        raise BadInput(f"{file.name} does not end in {' or '.join(suffixes)}")
    if file.exists() and not force:
        raise BadInput(f"{file} is there already", remedy="choose another name, or say --force")
    if not file.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {file.absolute().parent}", remedy="make it first")
    return file.absolute()


def _version(text: str | None) -> int | str | None:
    return None if text is None else version_of(text)


@click.command(epilog="Example:  sublet checkpoint restore spot-resnet state.pt --version best --keys model")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@version_option
@click.option(
    "--keys", default="", help="Only these parts, as 'show' lists them, with commas: model,optim.state"
)
@force_option
@json_option
def restore(name: str, file: Path, version: str | None, keys: str, force: bool, as_json: bool) -> None:
    """Write the whole state of NAME, verified, to FILE (.pt): torch.load(FILE, weights_only=True) reads it
    without sublet."""
    target = _free(file, (".pt", ".pth"), force)
    if find_spec("torch") is None:
        raise MissingExtra("a .pt file needs torch to be written", remedy="pip install 'sublet[torch]'")
    torch: Any = import_module("torch")
    wanted = [key.strip() for key in keys.split(",") if key.strip()] or None
    with checkpoints() as store, progress_bar(sizes=True) as progress:
        found = store.manifest(name, _version(version))
        state = store.load(name, version=found.version, keys=wanted, progress=progress)
        with whole_file(target) as draft:
            try:
                torch.save(as_tensors(state), draft)
            except RuntimeError as e:  # torch's own writer, for a disk that is full
                raise OSError(f"torch could not write it ({str(e).splitlines()[0][:100]})") from e
    told = {
        "name": name,
        "version": found.version,
        "step": found.step,
        "file": str(file),
        "bytes": target.stat().st_size,
    }
    if as_json:
        print_json(told)
        return
    click.echo(f"{name} version {found.version}, step {found.step}: {size(target.stat().st_size)} in {file}")


@click.command(epilog="Example:  sublet checkpoint export spot-resnet resnet.safetensors --weights model")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--weights", default=None, help="The part they are in, e.g. model; their names begin there.")
@version_option
@force_option
@json_option
def export(
    name: str, file: Path, weights: str | None, version: str | None, force: bool, as_json: bool
) -> None:
    """Write the tensors of NAME, verified, to FILE (.safetensors), for programs that know nothing of
    sublet."""
    target = _free(file, (".safetensors",), force)
    with checkpoints() as store, progress_bar(sizes=True) as progress:
        done = store.export(name, target, weights=weights, version=_version(version), progress=progress)
    if as_json:
        print_json(
            {
                "name": name,
                "file": str(file),
                "tensors": done.tensors,
                "bytes": done.bytes,
                "left_out": done.left_out,
            }
        )
        return
    click.echo(f"{done.tensors} tensors, {size(done.bytes)}, in {file}")
    if done.left_out:
        click.echo(f"{done.left_out} values that are no tensors were left out; 'restore' writes them too")


@click.command("import", epilog="Example:  sublet checkpoint import finetune base.safetensors --under model")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--under", default="", help="Where in the state the weights go, e.g. model.")
@json_option
def import_(name: str, file: Path, under: str, as_json: bool) -> None:
    """Begin job NAME with the weights in FILE (.safetensors or .pt). Only weights are read: nothing in a file
    is run."""
    settings = load_settings()
    tenant = settings["tenant"]
    ensure_tenant(settings, open_ledger(settings), tenant)
    with checkpoints(settings=settings) as store:
        saved = store.import_weights(name, file, under=under, tenant=tenant, actor=actor())
    if as_json:
        print_json(
            {"name": name, "version": saved.version, "digest": saved.digest, "bytes": saved.bytes_written}
        )
        return
    click.echo(
        f"{name} is at version {saved.version}: {size(saved.bytes_written)} from {file.name}; "
        f"save it on with expected_version={saved.version}"
    )


COMMANDS = (restore, export, import_)
