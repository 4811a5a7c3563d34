"""The catalogue is sane, clusters nest and grow, hardware files come back as they were or are refused."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.hardware.catalogue import ALIASES, CUDA_NAMES, DATA, cluster_of_gpu, read_catalogue
from meshwright.hardware.cluster import AttentionTime, Cluster, Collective, Level, Link, Matmul, ProfiledTimes
from meshwright.hardware.find import catalogue, cluster, known_name
from meshwright.hardware.hardware_file import from_json, to_json, write
from meshwright.hardware.network import with_network
from meshwright.spec.errors import UserError
from meshwright.units import FORMATS

KNOWN = catalogue()
every_cluster = pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)


@every_cluster
def test_peaks_are_dense_and_in_proportion(known: Cluster) -> None:
    peak = known.device.peak
    half = known.device.default_format if known.device.kind != "cpu" else "bf16"
    assert set(peak) <= set(FORMATS) and half in peak
    if "fp8" in peak:
        near = 0.03 if known.device.kind == "neuron" else 0.002  # as AWS states them
        assert peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=near)
    if "fp4" in peak:
        assert peak["fp4"] >= 2 * peak["fp8"]
    if "tf32" in peak:
        assert peak["fp32"] <= peak["tf32"] == pytest.approx(peak["bf16"] / 2, rel=0.002)
    # More FLOPs than bytes, and memory that is read in some seconds at most.
    assert max(peak.values()) / known.device.bandwidth > 1
    assert 0.005 < known.device.memory / known.device.bandwidth < 1


@every_cluster
def test_every_cluster_names_its_source_and_its_levels_get_slower(known: Cluster) -> None:
    assert len(known.device.source) > 20 and known.device.source.split(",")[0] in known.source
    big = known.resized(4096)
    assert big.levels[-1].devices == big.count == 4096
    for inner, outer in zip(big.levels, big.levels[1:], strict=False):
        assert inner.devices < outer.devices
        assert outer.link.bandwidth <= inner.link.bandwidth
        assert outer.link.latency > inner.link.latency


@every_cluster
def test_a_cluster_shrinks_and_grows_back(known: Cluster) -> None:
    for count in (1, 3, 8, 12, 1000):
        there = known.resized(count)
        assert there.count == count and sum(level.devices >= count for level in there.levels) == 1
        assert there.resized(known.count) == known


@every_cluster
def test_json_brings_a_cluster_back(known: Cluster, tmp_path: Path) -> None:
    assert from_json(json.loads(json.dumps(to_json(known)))) == known
    write(known, tmp_path / "it.json")
    assert cluster(str(tmp_path / "it.json")) == known


def test_names_of_devices_lead_to_the_catalogue() -> None:
    assert {*ALIASES.values(), *CUDA_NAMES.values()} <= set(KNOWN)
    assert cluster_of_gpu("NVIDIA H100 80GB HBM3") is KNOWN["h100-sxm"]
    assert cluster_of_gpu("NVIDIA H100 NVL") is KNOWN["h100-nvl"]
    assert cluster_of_gpu("NVIDIA H200 NVL") is KNOWN["h200-nvl"]
    assert cluster_of_gpu("NVIDIA H200") is KNOWN["h200"]
    assert cluster_of_gpu("NVIDIA L4") is KNOWN["l4"]
    assert cluster_of_gpu("NVIDIA L40") is None
    assert cluster("DGX-H100", 64) == KNOWN["h100-sxm"].resized(64)
    assert cluster("cpu", 3).sharing == 3 and cluster("h100", 64).sharing == 1


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100-80gb", "h100-sxm"),
        ("H100-96GB", "h100-96"),
        ("A100 80GB", "a100-80-sxm"),
        ("a100-40gb", "a100-40-sxm"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA-GeForce-RTX-3090", "rtx-3090"),
        ("Tesla V100 16 GB", "v100-16"),
        ("AMD Instinct MI300X 192GB", "mi300x"),
        ("l40s_48GB", "l40s"),
        ("h100-40gb", None),
        ("p100", None),
        ("80gb", None),
    ],
)
def test_a_name_is_known_however_it_is_written(written: str, name: str | None) -> None:
    """A memory behind it must be the device's."""
    assert known_name(written) == name
    assert name is None or cluster(written) == KNOWN[name]


def test_level_of_is_the_innermost_that_holds_all() -> None:
    found = cluster("h100-sxm", 1024)
    assert [found.level_of(ranks).name for ranks in ((5,), (0, 7), (7, 8), (0, 255), (255, 256))] == [
        "node",
        "node",
        "leaf",
        "leaf",
        "spine",
    ]
    with pytest.raises(ValueError, match="within 1024"):
        found.level_of([0, 1024])


def test_a_network_is_changed() -> None:
    found = with_network(
        cluster("h100-sxm"), nodes=64, nics=4, nic_bandwidth=25e9, oversubscription=2, price=2
    )
    assert found.count == 512 and found.price == 2
    assert [level.link.bandwidth for level in found.levels] == [450e9, 12.5e9, 12.5e9]
    assert [level.loaded for level in found.levels] == [450e9, 12.5e9, 6.25e9]
    four = with_network(cluster("h100-sxm"), per_node=4, nodes=64)  # the same NICs for half as many
    assert four.level_of((0, 4)).link.bandwidth == 100e9 and four.levels[0].devices == 4


MEASURED = ProfiledTimes(
    matmul=(Matmul("bf16", 8, 8, 8, 1e-6),),
    attention=(AttentionTime("bf16", 1, 8, 2, 64, 128, 1e-4, 3e-4),),
    collectives=(Collective("all_reduce", 2, "host", 1024, 1e-4),),
    overlap_compute=1.5,
    taken={"date": "2026-11-22"},
)
HOST = Level("host", 2, Link(1e-5, 1e9), kind="memory")


def tree() -> dict:  # type: ignore[type-arg]
    device = KNOWN["cpu"].device
    return to_json(Cluster("mine", device, 2, (HOST,), None, "here", MEASURED))


def test_a_measured_file_comes_back(tmp_path: Path) -> None:
    mine = from_json(tree())
    assert mine.measured == MEASURED
    assert mine.resized(4).levels[0].devices == mine.resized(4).sharing == 4
    write(mine, tmp_path / "mine.json")
    assert cluster(str(tmp_path / "mine.json")) == mine


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["cuont"], 3, ["cuont: unknown key", "'count'"]),
        (["device", "peak", "fp7"], 1, ["fp7", "fp8"]),
        (["device", "peak"], {}, ["device.peak", "is empty", "bf16"]),
        (["device", "rates", "matmul"], 2.5, ["device.rates.matmul: 2.5", "not a share", "up to 1"]),
        (["device", "rates", "network"], 0, ["device.rates.network: 0", "not a share"]),
        (["device", "rates", "launch"], -1, ["device.rates.launch: -1", "0 or more"]),
        (["device", "memory"], "80G", ["device.memory", '"80G"', "whole number"]),
        (["device", "memory"], 0, ["device.memory: 0", "at least 1"]),
        (["device", "memory"], 24, ["device.memory: 24 is a number of bytes", "24000000000 for 24 GB"]),
        (["count"], 3, ["levels", "3 devices"]),
        (["levels"], [], ["levels"]),
        (["levels"], 7, ["levels", "a list"]),
        (["price"], -1, ["price", "-1"]),
        (["price"], float("nan"), ["price", "nan"]),
        (["levels", 0, "kind"], "nvlnk", ["levels[0].kind", "nvlink"]),
        (["levels", 0, "link", "bandwidth"], 0, ["levels[0].link.bandwidth: 0", "above 0"]),
        (["levels", 0, "oversubscription"], 0.5, ["levels[0].oversubscription: 0.5", "at least 1"]),
        (["measured", "matmul"], [["bf16", 8, 8, 8]], ["measured.matmul[0]", "format, m, n, k, seconds"]),
        (["measured", "matmul"], [["bf16", 8, 8, 8, 0]], ["measured.matmul[0].seconds: 0", "above 0"]),
        (["measured", "taken"], 3, ["measured.taken", "a table"]),
    ],
)
def test_a_broken_file_gets_a_sentence(path: list, value: object, said: list[str], tmp_path: Path) -> None:  # type: ignore[type-arg]
    file, whole = tmp_path / "hw.json", json.loads(json.dumps(tree()))
    node = whole
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    file.write_text(json.dumps(whole))
    with pytest.raises(UserError) as caught:
        cluster(str(file))
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in said), caught.value


def test_what_is_no_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"name": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "less.json").write_text(json.dumps({"name": "x"}))
    for name, said in (
        ("h100-smx", "did you mean 'h100-sxm'"),
        ("nothing-like-it", "the names are a100-40-sxm"),
        (str(tmp_path / "lost.json"), "there is no hardware file"),
        (str(tmp_path / "half.json"), "cannot be read as JSON"),
        (str(tmp_path / "list.json"), "a table"),
        (str(tmp_path / "deep.json"), "nested too deep"),
        (str(tmp_path / "less.json"), "device: is missing"),
    ):
        with pytest.raises(UserError, match=said):
            cluster(name)
    with pytest.raises(UserError, match="count: 0"):
        cluster("h100", 0)
    with pytest.raises(UserError, match="cpu: has no nodes"):
        with_network(cluster("cpu"), nics=2)


def test_what_is_changed_of_a_level_counts_in_larger_and_smaller_clusters() -> None:
    (node,) = cluster("h100", 8).levels
    slow = replace(cluster("h100", 8), levels=(replace(node, link=replace(node.link, latency=3.0)),))
    for count in (4, 8, 64):
        assert slow.resized(count).levels[0].link.latency == 3.0
        assert slow.resized(count).levels[-1].devices == count
    assert slow.resized(64).levels[1:] == cluster("h100", 64).levels[1:]


def catalogue_tree() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", ["rates", "links", "networks", "clusters"])
def test_figures_of_the_catalogue_without_a_source_are_refused(group: str) -> None:
    tree = catalogue_tree()
    for name, table in tree[group].items():
        bare = {key: value for key, value in table.items() if key not in ("source", "fitted_on")}
        with pytest.raises(UserError, match=rf"^file: {group}\.{name}: has neither 'source' nor 'fitted_on'"):
            read_catalogue(tree | {group: tree[group] | {name: bare}}, "file")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("memory", "80G", r'^file: clusters\.l4: memory: "80G" is not valid: it should be a whole number'),
        ("memori", 80, r"^file: clusters\.l4: memori: unknown key; did you mean 'memory'"),
        ("rates", "ampire", r"^file: rates: there is no table 'ampire'; the tables are ampere, hopper"),
        ("extends", "l5", r"^file: clusters\.l4\.extends: 'l5' is not a table above it"),
    ],
)
def test_broken_tables_of_the_catalogue_are_refused(key: str, value: object, sentence: str) -> None:
    tree = catalogue_tree()
    tree["clusters"]["l4"][key] = value
    with pytest.raises(UserError, match=sentence):
        read_catalogue(tree, "file")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Link(-1, 1e9), "latency: -1 is not valid: it should be at least 0"),
        (lambda: Link(1e-6, 0), "bandwidth: 0 is not valid: it should be above 0"),
        (lambda: cluster("h100").resized(0), "count: 0"),
        (lambda: with_network(cluster("h100"), oversubscription=0.5), "oversubscription: 0.5 is not valid"),
        (lambda: with_network(cluster("h100"), nics=0), "nics: 0 is not valid: it should be at least 1"),
        (lambda: replace(cluster("h100").device, peak={}), "device.peak: is empty"),
    ],
)
def test_hardware_that_python_code_makes_is_checked_too(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("name", "format", "measured"),
    [("mi300x", "bf16", 708), ("mi300x", "fp8", 1273), ("mi325x", "bf16", 843), ("mi325x", "fp8", 1519)],
)
def test_products_on_cdna_3_attain_what_amd_measured(name: str, format: str, measured: float) -> None:
    """AMD 2025, Measuring Max-Achievable FLOPs, part 2, table 1; TFLOP/s."""
    device = cluster(name).device
    assert device.peak[format] * device.attained(format) / 1e12 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("b300", 275_040),  # 268.6 GiB of what is sold as 288 GB
        ("gb300", 284_208),
        ("b200", 183_359),
        ("h200", 143_771),
        ("h100", 81_559),
        ("a100", 81_920),
        ("rtx-4090", 24_564),
        ("a10g", 23_028),
        ("mi355x", 294_896),
        ("tpu-v6e", 32_000),
        ("v100", 32_768),
    ],
)
def test_memory_is_what_drivers_report(name: str, mib: int) -> None:
    assert cluster(name).device.memory == mib * 2**20


def test_devices_that_this_program_does_not_run_on_say_so() -> None:
    only = {name: known.device.planning_only for name, known in KNOWN.items() if known.device.planning_only}
    assert set(only) == {"tpu-v4", "tpu-v5p", "tpu-v5e", "tpu-v6e", "tpu-v7", "trn2"}
    words = "is known for planning only: this program runs on CUDA, ROCm and CPU"
    assert only["tpu-v5e"] == f"tpu-v5e {words}" and only["trn2"] == f"Trainium2 {words}"


def test_a_v100_computes_in_fp16_by_default() -> None:
    formats = {name: cluster(name).device.default_format for name in ("v100", "a100", "mi300x", "cpu")}
    assert formats == {"v100": "fp16", "a100": "bf16", "mi300x": "bf16", "cpu": "fp32"}
