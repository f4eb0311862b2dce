"""Changes that put a fault into a repository; it was copied with hard links, so each writes a new file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtserve.repository.config import parse_config

Change = Callable[[Path], object]
CORE, PRE, POST, BLS = "tensorrt_llm", "preprocessing", "postprocessing", "tensorrt_llm_bls"
ENGINE = "tensorrt_llm/1/config.json"
TOKENIZER = "preprocessing/1/tokenizer"


@dataclass(frozen=True)
class Fault:
    """`change` puts it into the good repository `base`; `rule` must find it."""

    base: str
    rule: str
    what: str
    change: Change


def write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def edit(model: str, change: Callable[[Any], object]) -> Change:
    """Change the message of a config.pbtxt."""

    def apply(repository: Path) -> None:
        from google.protobuf import text_format

        file = repository / model / "config.pbtxt"
        config = parse_config(file.read_text())
        change(config)
        write(file, text_format.MessageToString(config))

    return apply


def text(file: str, old: str, new: str) -> Change:
    """Change the text of a file."""

    def apply(repository: Path) -> None:
        before = (repository / file).read_text()
        assert old in before
        write(repository / file, before.replace(old, new, 1))

    return apply


def parameter(model: str, key: str, value: str | None) -> Change:
    """Set a parameter; None removes it."""

    def change(config: Any) -> None:
        if value is None:
            del config.parameters[key]
        else:
            config.parameters[key].string_value = value

    return edit(model, change)


def tensor(model: str, name: str, change: Callable[[Any], object]) -> Change:
    """Change one declared tensor."""
    return edit(model, lambda config: change(next(t for t in (*config.input, *config.output) if t.name == name)))


def without(model: str, name: str) -> Change:
    """Take the declaration of an input away."""

    def change(config: Any) -> None:
        kept = [each for each in config.input if each.name != name]
        assert len(kept) < len(config.input)
        del config.input[:]
        config.input.extend(kept)

    return edit(model, change)


def assign(target: str, value: object) -> Callable[[Any], object]:
    """Set a field of a message."""
    return lambda message: setattr(message, target, value)


def content(file: str, *keys: str, to: object) -> Change:
    """Set a value of a JSON or YAML file."""

    def apply(repository: Path) -> None:
        path = repository / file
        load, dump = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
        found = place = load(path.read_text())
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = to
        write(path, dump(found))

    return apply


def remove(name: str) -> Change:
    """Take a file or folder away."""

    def apply(repository: Path) -> None:
        path = repository / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def replaced(name: str, new: str) -> Change:
    return lambda repository: write(repository / name, new)


def shortened(name: str) -> Change:
    """Cut a file in half."""

    def apply(repository: Path) -> None:
        content = (repository / name).read_bytes()
        (repository / name).unlink()
        (repository / name).write_bytes(content[: len(content) // 2])

    return apply


def dangling(name: str) -> Change:
    def apply(repository: Path) -> None:
        (repository / name).unlink()
        (repository / name).symlink_to("/nowhere/rank0.engine")

    return apply


def closed(name: str) -> Change:
    """Remove the read permission of a file."""

    def apply(repository: Path) -> None:
        before = (repository / name).read_bytes()
        (repository / name).unlink()
        (repository / name).write_bytes(before)
        (repository / name).chmod(0)

    return apply


def both(*changes: Change) -> Change:
    return lambda repository: [change(repository) for change in changes]


def step(number: int, change: Callable[[Any], object]) -> Change:
    """Change one step of the ensemble."""
    return edit("ensemble", lambda config: change(config.ensemble_scheduling.step[number]))


def moved(maps: str, old: str, new: str) -> Callable[[Any], None]:
    """Rename a key of a step's map."""

    def change(found: Any) -> None:
        mapped = getattr(found, maps)
        mapped[new] = mapped[old]
        del mapped[old]

    return change


def mapped(maps: str, key: str, value: str | None) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        if value is None:
            del getattr(found, maps)[key]
        else:
            getattr(found, maps)[key] = value

    return change


def added_tensor(model: str, **fields: Any) -> Change:
    return edit(model, lambda config: config.input.add(**fields))


def instances(model: str, count: int) -> Change:
    return edit(model, lambda config: setattr(config.instance_group[0], "count", count))


def policy(model: str, decoupled: bool) -> Change:
    return edit(model, lambda config: setattr(config.model_transaction_policy, "decoupled", decoupled))


def tokens(change: Callable[[dict[str, Any]], object], *, place: str = TOKENIZER) -> Change:
    """Change tokenizer.json."""

    def apply(repository: Path) -> None:
        path = repository / place / "tokenizer.json"
        found = json.loads(path.read_text())
        change(found)
        write(path, json.dumps(found))

    return apply


def adapter_rank(repository: Path) -> None:
    import numpy as np

    path = repository / "tensorrt_llm/1/lora/french/model.lora_config.npy"
    rows = np.load(path)
    rows[..., 2] = 7
    path.unlink()
    np.save(path, rows)


def adapter_content(repository: Path) -> None:
    import numpy as np

    path = repository / "tensorrt_llm/1/lora/french/model.lora_weights.npy"
    weights = np.load(path)
    path.unlink()
    np.save(path, weights + 1)


def stray(repository: Path) -> None:
    (repository / "checkpoints").mkdir()


def vocabulary(found: Mapping[str, Any]) -> dict[str, int]:
    tokens: dict[str, int] = found["model"]["vocab"]
    return tokens
