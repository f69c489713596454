"""Hostfiles: the hosts that they list, and one sentence for each that does not fit."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.errors import Refused
from ddpperf.node.hostfile import Host, is_own_node, parse_hostfile, read_hostfile
from tests.generated import BOUNDED

HOSTS = """
# the further nodes
node-b            # the rack's second
ana@node-c:2222
[fe80::1%eth0]:22
10.0.0.4 slots=8
"""


def test_hostfile_lists_hosts_in_order() -> None:
    assert parse_hostfile(HOSTS, "hosts").hosts == (
        Host(name="node-b"),
        Host(name="node-c", user="ana", port=2222),
        Host(name="fe80::1%eth0", port=22),
        Host(name="10.0.0.4"),
    )


def test_printed_host_reads_as_itself() -> None:
    for host in parse_hostfile(HOSTS.replace("ana@", ""), "hosts").hosts:
        assert parse_hostfile(str(host), "hosts").hosts == (host,)


def test_unused_slots_are_reported() -> None:
    assert parse_hostfile(HOSTS, "hosts").note.startswith("hosts: slots= is not used; --node-size sets")
    assert parse_hostfile("b\nc\n", "hosts").note == ""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the hostfile hosts lists no host; write"),
        ("# b\n\n", "the hostfile hosts lists no host; write"),
        ("b\nc\nB slots=2\n", "hosts, line 3: B is listed twice; list each node once"),
        ("ana@b\neve@b", "hosts, line 2: b is listed twice; list each node once"),
        ("b\n-oProxyCommand=x\n", "hosts, line 2: '-oProxyCommand=x' is not a host; write"),
        ("-l@b", "hosts, line 1: '-l@b' is not a host; write"),
        ("b c", "hosts, line 1: 'b c' is not a host; write"),
        ("b:0", "hosts, line 1: 'b:0' is not a host; write"),
        ("b:65536", "hosts, line 1: 'b:65536' is not a host; write"),
        ("b slots=many", "hosts, line 1: 'b slots=many' is not a host; write"),
        ("b\N{LINE SEPARATOR}c", r"hosts, line 1: 'b\u2028c' is not a host; write"),
    ],
)
def test_malformed_hostfile_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_hostfile(text, "hosts")
    assert str(refused.value).startswith(sentence)


@BOUNDED
@given(st.text() | st.lists(st.text(alphabet="ab@:[]%.-#= \tslots019")).map("\n".join))
def test_any_text_has_hosts_or_sentence(text: str) -> None:
    hosts: tuple[Host, ...] = ()
    sentence = ""
    try:
        hosts = parse_hostfile(text, "hosts").hosts
    except Refused as refused:
        sentence = str(refused)
    assert len(sentence.splitlines()) == (0 if hosts else 1)
    assert all(host.name.isascii() and not host.name.startswith("-") for host in hosts)


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (2, "--nodes 2 needs 1 other hosts"),
        (4, "--nodes 4 needs 3 other hosts"),
    ],
)
def test_wrong_number_of_hosts_is_refused(tmp_path: Path, nodes: int, sentence: str) -> None:
    (file := tmp_path / "hosts").write_text("no-such-b.invalid\nno-such-c.invalid\n")
    with pytest.raises(Refused) as refused:
        read_hostfile(file, nodes)
    assert str(refused.value).startswith(f"{sentence}, found 2 in {file}; correct the file, which")
    assert str(refused.value).endswith("pass --nodes 3")


@pytest.mark.parametrize("own", ["localhost", "127.0.0.1", "::1", socket.gethostname()])
def test_own_node_in_hostfile_is_refused(tmp_path: Path, own: str) -> None:
    (file := tmp_path / "hosts").write_text(f"[{own}]\n" if ":" in own else f"{own}\n")
    with pytest.raises(
        Refused, match=f"hosts lists {own}, which is the first node, where pytest runs; delete"
    ):
        read_hostfile(file, 2)


def test_local_port_can_be_another_node() -> None:
    assert is_own_node(Host(name="127.0.0.1"))
    assert not is_own_node(Host(name="127.0.0.1", port=2222))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"\xff\n", "it is not a text file"),
    ],
)
def test_unreadable_hostfile_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Refused, match=rf"hosts cannot be read \({why}\); correct"):
        read_hostfile(file, 2)
    with pytest.raises(Refused, match="Is a directory"):
        read_hostfile(tmp_path, 2)


def test_endless_hostfile_is_refused() -> None:
    with pytest.raises(Refused, match="it is not a regular file"):
        read_hostfile(Path("/dev/zero"), 2)
