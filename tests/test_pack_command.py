"""``hlo-memopt pack``: figures, files, exit statuses, and one line for every error."""

from __future__ import annotations

import csv
import json
import os

import pytest
from click.testing import CliRunner
from pack_cases import sliced

from hlo_memopt.cli.main import cli
from hlo_memopt.pack.problem import PackingProblem
from hlo_memopt.pack.table import parse_table
from hlo_memopt.pack.validate import validate


def call(*args, **extra):
    return CliRunner().invoke(cli, ["pack", *map(str, args)], **extra)


def write(path, *lines, header="id,lower,upper,size"):
    path.write_text("\n".join([header, *lines, ""]))
    return path


@pytest.fixture
def given(tmp_path):
    return write(tmp_path / "p.csv", "a,0,3,4", "b,3,9,4", "c,0,9,4", "d,9,21,4", "e,0,21,4")


def assert_one_line(result, status, *parts):
    assert result.exit_code == status, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("hlo-memopt: ") and "internal error" not in lines[0], result.stderr
    for part in parts:
        assert str(part) in lines[0], lines[0]


def test_it_writes_the_table_with_offsets(given, tmp_path):
    out, figures = tmp_path / "out.csv", tmp_path / "f.json"
    result = call(given, "-o", out, "--json", figures, "--capacity", "12")
    assert result.exit_code == 0 and result.stderr == "", result.output
    assert "proven" in result.stdout and f"Wrote {out}" in result.stdout and "fits" in result.stdout
    rows = list(csv.DictReader(out.open()))
    content = json.loads(figures.read_text())
    problem = parse_table(given.read_text(), "p").problem
    assert [r["id"] for r in rows] == list("abcde") and list(rows[0]) == ["id", "lower", "upper", "size", "offset"]
    assert validate(problem, [int(r["offset"]) for r in rows], 12) == 12 == content["height_bytes"]
    assert content["offsets"] == [int(r["offset"]) for r in rows] and content["fits"] and content["proven"]
    assert content["lower_bound_bytes"] == 12 and content["capacity_bytes"] == 12 and content["buffers"] == 5
    again = call(out, "-o", "-")  # its own output is a problem with all offsets given
    assert again.exit_code == 0 and again.stdout == out.read_text()


def test_without_output_it_only_reports(given):
    result = call(given)
    assert result.exit_code == 0 and "height" in result.stdout and "Nothing was written." in result.stdout
    assert "capacity" not in result.stdout


def test_json_alone_on_stdout_and_a_table_from_stdin(given):
    result = call("-", "--json", "-", input=given.read_text())
    assert result.exit_code == 0 and json.loads(result.stdout)["input"] == "<stdin>"


def test_columns_are_found_by_name_and_kept(tmp_path):
    source = write(
        tmp_path / "p.csv", "8,x,0,5,9,a,", "7, 16 ,0,5,1,b,4", header="size,note,lower,upper,alignment,id,offset"
    )
    result = call(source, "-o", "-")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [r["note"] for r in rows] == ["x", " 16 "] and rows[1]["offset"] == "4"
    assert int(rows[0]["offset"]) == 18


def test_what_does_not_fit_is_status_1_and_writes_no_table(given, tmp_path):
    out, figures = tmp_path / "out.csv", tmp_path / "f.json"
    result = call(given, "--capacity", "11", "-o", out, "--json", figures)
    assert_one_line(result, 1, given, "no packing within the capacity 11 exists", "12")
    assert not out.exists() and json.loads(figures.read_text())["fits"] is False
    assert "does not fit" in result.stdout and "Nothing was written" in result.stdout


def test_not_found_is_said_apart_from_impossible(tmp_path):
    problem: PackingProblem = sliced(11, 120)
    source = write(tmp_path / "p.csv", *(f"{b.id},{b.lower},{b.upper},{b.size}" for b in problem.buffers))
    result = call(source, "--capacity", 1_000_000, "--effort", "fast", "--time-limit", "0.001")
    assert_one_line(result, 1, "no packing within the capacity 1000000 was found; the best takes", "--effort max")


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        (["a,0,3,4", "b,x,3,4"], ":3", "lower is 'x', not a whole number"),
        (["a,0,3"], ":2", "has 3 cells where the header has 4"),
        (["a,0,3,-4"], ":2", "size -4"),
        (["", "a,3,3,4"], ":3", "lower 3 is not before upper 3"),
        (["a,0,3,4.5"], ":2", "size is '4.5'"),
        (['"a,0,3,4'], ":2", "is no CSV"),
        ([f"a,0,3,{'9' * 5000}"], ":2", "not a whole number"),
        ([f"a,0,3,{2**60}", f"b,0,3,{2**60}"], "p.csv", "more than 2^61"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, lines, where, words):
    source = write(tmp_path / "p.csv", *lines)
    assert_one_line(call(source, "-o", tmp_path / "o.csv"), 2, where, words)
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("id,lower,upper,size,gaps", "column gaps, which is not supported"),
        ("id,start,end,size", "header without lower, upper"),
        ("id,lower,upper,size,size", "column size twice"),
    ],
)
def test_bad_headers(tmp_path, header, words):
    assert_one_line(call(write(tmp_path / "p.csv", header=header)), 2, "p.csv:1", words)


def test_bad_columns_alignment_and_offset(tmp_path):
    source = write(tmp_path / "p.csv", "a,0,3,4,4,6", header="id,lower,upper,size,alignment,offset")
    assert_one_line(call(source), 2, "p.csv:2", "fixed offset 6 is not a multiple of the alignment 4")
    source = write(tmp_path / "p.csv", "a,0,3,4,0", "b,0,3,4,2", header="id,lower,upper,size,offset")
    assert_one_line(call(source), 2, "p.csv", "'a' and 'b' are fixed to the same bytes")


def test_bad_files(tmp_path, given):
    assert_one_line(call(tmp_path / "none.csv"), 2, "none.csv", "cannot be read")
    assert_one_line(call(tmp_path), 2, tmp_path, "cannot be read")
    (tmp_path / "empty.csv").write_text("\n\n")
    assert_one_line(call(tmp_path / "empty.csv"), 2, "is empty")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    assert_one_line(call(tmp_path / "binary.csv"), 2, "no text in UTF-8")
    assert_one_line(call(given, "-o", tmp_path / "no" / "o.csv"), 2, "folder does not exist")
    assert_one_line(call(given, "-o", tmp_path), 2, "is a directory")
    assert_one_line(call(given, "-o", tmp_path / "x", "--json", tmp_path / "x"), 2, "name the same file")
    assert_one_line(call(given, "-o", "-", "--json", "-"), 2, "name the same file")
    assert_one_line(call(given, "--capacity", "-3"), 2, "capacity")
    assert_one_line(call(given, "--time-limit", "nan"), 2, "time_limit")
    assert sorted(os.listdir(tmp_path)) == ["binary.csv", "empty.csv", "p.csv"]


def test_a_header_alone_packs_nothing(tmp_path):
    result = call(write(tmp_path / "p.csv"), "-o", "-")
    assert result.exit_code == 0 and result.stdout == "id,lower,upper,size,offset\n"
