"""A command inside NVIDIA's container: the flags of docker, the mounts, what is refused and how failures are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.doubles.docker import parse_run
from tests.doubles.mounts import check_mounts, parse_mount
from trtserve.errors import UsageError
from trtserve.nvidia.containers import (
    ContainerRun,
    explained,
    image_of,
    in_container,
    installed_in,
    require_installed_in,
    with_targets,
)
from trtserve.nvidia.releases.containers import all_containers
from trtserve.process import Command

IMAGE = "nvcr.io/nvidia/tritonserver:25.12-trtllm-python-py3"


def box(**changes: object) -> ContainerRun:
    return ContainerRun(**{"image": IMAGE, "name": "trtserve-test", **changes})  # type: ignore[arg-type]


def test_the_flags_of_nvidias_own_examples(tmp_path: Path) -> None:
    wrapped = in_container(
        Command(argv=("trtllm-build", "--checkpoint_dir", str(tmp_path)), env={"A": "1"}, cwd=tmp_path),
        box(writable=(tmp_path,)),
    )
    run = parse_run(list(wrapped.argv[2:]))
    assert wrapped.argv[:2] == ("docker", "run")
    assert (run.image, run.command) == (IMAGE, ["trtllm-build", "--checkpoint_dir", str(tmp_path)])
    assert {"rm", "init"} <= run.switches
    assert run.options["network"] == ["host"]
    assert run.options["gpus"] == ["all"]
    assert run.options["shm-size"] == ["2g"]
    assert run.options["ulimit"] == ["memlock=-1", "stack=67108864"]
    assert run.options["user"] == [f"{os.getuid()}:{os.getgid()}"]
    assert run.options["name"] == ["trtserve-test"]
    assert run.options["workdir"] == [str(tmp_path)]
    assert run.options["volume"] == [f"{tmp_path}:{tmp_path}"]
    assert "A=1" in run.options["env"]
    assert (wrapped.env, wrapped.cwd) == ({}, None)


def test_tokens_go_in_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    wrapped = in_container(Command(argv=("true",)), box())
    assert "hf_secret" not in str(wrapped)
    assert "HF_TOKEN" in parse_run(list(wrapped.argv[2:])).options["env"]
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" not in in_container(Command(argv=("true",)), box()).argv


def test_a_folder_is_mounted_once(tmp_path: Path) -> None:
    for name in ("models/a", "out"):
        (tmp_path / name).mkdir(parents=True)
    wrapped = in_container(
        Command(argv=("true",)),
        box(read_only=(tmp_path / "models" / "a", tmp_path / "models", tmp_path / "out"), writable=(tmp_path / "out",)),
    )
    mounts = [parse_mount(text) for text in parse_run(list(wrapped.argv[2:])).options["volume"]]
    check_mounts(mounts)
    assert [(mount.target, mount.read_only) for mount in mounts] == [
        (str(tmp_path / "out"), False),
        (str(tmp_path / "models"), True),
    ]


def test_links_of_a_snapshot_lead_to_mounted_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").touch()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to("../blobs/1")
    (tmp_path / "snapshot" / "again").symlink_to("config.json")
    assert with_targets([tmp_path / "snapshot"]) == (tmp_path / "snapshot", tmp_path / "blobs")


@pytest.mark.parametrize(
    ("path", "words"), [("/usr", "hide files of the image"), ("/opt/tritonserver", "hide"), ("/a:b", "colon")]
)
def test_paths_that_cannot_be_mounted(path: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        in_container(Command(argv=("true",)), box(read_only=(Path(path),)))


@pytest.mark.parametrize("flag", ["--ipc=host", "--shm-size=8g"])
def test_own_flags_replace_the_shared_memory(flag: str) -> None:
    argv = in_container(Command(argv=("true",)), box(flags=(flag,))).argv
    assert [word for word in argv if word.startswith(("--shm-size", "--ipc"))] == [flag]
    assert argv.index(flag) < argv.index(IMAGE)


def test_images_by_tag_name_and_digest() -> None:
    assert image_of("25.12") == IMAGE
    for own in ("triton_trt_llm", "registry:5000/a/b:c", "a/b@sha256:0123"):
        assert image_of(own) == own
    with pytest.raises(UsageError, match="24\\.08 … 26\\.07"):
        image_of("23.10")
    with pytest.raises(UsageError, match="neither a tag"):
        image_of("an image")


def test_the_version_in_a_container() -> None:
    for each in all_containers():
        found = installed_in(each.tag)
        assert found is not None
        assert (found.version, found.release) == (each.tensorrt_llm, each.release)
    assert installed_in("mine") is None
    assert require_installed_in("mine", "1.0.0").release == "1.0"
    with pytest.raises(UsageError, match=r"--trtllm-version is 0\.12\.0"):
        installed_in("25.12", "0.12.0")
    with pytest.raises(UsageError, match="version of the image mine is unknown"):
        require_installed_in("mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            "no access to NVIDIA GPUs",
        ),
        ("Unable to find image 'x:y' locally\ndocker: Error response from daemon: manifest unknown", "pull the image"),
        ('docker: exec: "trtllm-build": executable file not found in $PATH', "lacks the program"),
        ("docker: failed to register layer: write /usr/lib/x: no space left on device", "disk is full"),
    ],
)
def test_errors_of_docker_are_explained(text: str, words: str) -> None:
    assert words in str(explained(text))


def test_a_failure_inside_a_container_is_not_dockers() -> None:
    assert explained("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMalloc: out of memory") is None
    shared_memory = "Failed to increase the shared memory pool: No space left on device"
    assert explained(f"Unable to find image 'x:y' locally\n{shared_memory}\nunauthorized") is None
