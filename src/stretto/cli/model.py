"""`stretto model`: fetch or make models, and say what is there."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.model_new import new
from stretto.cli.output import say, write_json, write_line
from stretto.models.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from stretto.models import ResolvedModel

app = typer.Typer(no_args_is_help=True, help="Fetch or make models, and say what is there.")

Name = Annotated[str, typer.Argument(help="A model name, folder, .gguf file or hub org/model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verify = Annotated[bool, typer.Option("--verify", help="Also hash the weights and print it.")]


@app.command()
def pull(name: Name = EMBEDDED_MODEL) -> None:
    """Fetch a model, convert it if needed, and print its folder. Damaged copies are rebuilt."""
    from stretto import models

    write_line(str(models.pull(name).path))


@app.command()
def info(name: Name = EMBEDDED_MODEL, as_json: AsJson = False, verify: Verify = False) -> None:
    """Describe a model that is on this disk. Nothing is fetched."""
    from stretto import models

    facts = _facts(models.resolve(name, offline=True), hashed=verify)
    if as_json:
        write_json(facts)
        return
    for key, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else json.dumps(value).strip('"')
        write_line(f"{key:<15} {shown}")


def _facts(model: "ResolvedModel", *, hashed: bool) -> dict[str, Any]:
    """Return what `model info` prints; `sha256` holds one hash per weight file, or null."""
    from stretto.models.manifest import sha256_of
    from stretto.models.weights import weight_files

    hashes = {path.name: sha256_of(path) for path in weight_files(model.path)} if hashed else None
    return {
        "name": model.name,
        "path": str(model.path),
        "source": model.source,
        **asdict(model.facts),
        "sha256": hashes,
    }


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models in Stretto's own cache."""
    from stretto.models.cache import models_root
    from stretto.models.listing import cached_models

    found = cached_models()
    if as_json:
        write_json([{**asdict(model), "path": str(model.path)} for model in found])
        return
    if not found:
        say(f"no models in {models_root()}; `stretto model pull` fetches one")
    for model in found:
        state = f"{model.size_bytes / 1e6:.0f} MB" if model.problem is None else model.problem
        write_line(f"{model.name}\t{state}\t{model.path}")


app.command()(new)
