"""The value of a `--config` flag: a config file with its arguments, such as configs/x.py:size=tiny,steps=2."""


def split_config(config: str) -> tuple[str, dict[str, str]]:
    """Return the file of a config flag, and its arguments as {name: "name=value"}."""
    file, _, arguments = config.partition(":")
    return file, arguments_by_name(arguments)


def arguments_by_name(arguments: str) -> dict[str, str]:
    """Return config arguments "a=1,b=2" as {"a": "a=1", "b": "b=2"}."""
    return {part.partition("=")[0].strip(): part for part in arguments.split(",") if part.strip()}


def with_arguments(config: str, *more: str) -> str:
    """Return a config flag with further arguments, which replace arguments of the same name."""
    file, arguments = split_config(config)
    return f"{file}:{','.join((arguments | arguments_by_name(','.join(more))).values())}"
