"""``tide config``: the configuration shown, checked, migrated, or begun."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="One YAML file, with TIDE_SECTION__NAME variables over it.")

ConfigOption = Annotated[Path | None, typer.Option(help="Configuration file; TIDE_CONFIG names one as well.")]


@app.command()
def show(config: ConfigOption = None) -> None:
    """Print every setting as it is in force: file, variables, defaults."""
    from tide_platform.config import dump_settings, load_settings

    typer.echo(dump_settings(load_settings(config)), nl=False)


@app.command()
def check(config: ConfigOption = None) -> None:
    """Say whether the configuration can be read; exit status 2 names what is wrong."""
    from tide_platform.config import load_settings

    settings = load_settings(config)
    typer.echo(f"ok: deployment {settings.deployment}, config_version {settings.config_version}")


@app.command()
def migrate(
    path: Annotated[Path, typer.Argument(help="The file to rewrite; the old one is kept as PATH.bak.")],
) -> None:
    """Bring a configuration file of an earlier release to the version that this one reads."""
    from tide_platform.config.migrate import migrate_file

    before, after = migrate_file(path)
    changed = (
        f"config_version {before} -> {after}; the old file is {path}.bak"
        if before != after
        else "nothing to do"
    )
    typer.echo(f"{path}: {changed}")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("tide.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it if it is there.")] = False,
) -> None:
    """Write a configuration file with every setting at its default."""
    from tide_platform.config import ConfigError, Settings, dump_settings

    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; give --force to overwrite it, or another path")
    path.write_text(dump_settings(Settings.model_validate({})))
    typer.echo(f"{path}: use it with --config {path}, or TIDE_CONFIG={path}")
