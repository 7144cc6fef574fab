from __future__ import annotations

from sublet.core.runs.remote_environment import folders, placed_environment


def test_the_callers_variables_go_along_and_a_machines_own_stay() -> None:
    caller = {
        "HOME": "/home/ann",
        "API_KEY": "k",
        "PATH": "/venv/bin:/bin",
        "TMPDIR": "/scratch",
        "ONLY": "here",
    }
    node = {"HOME": "/root", "PATH": "/usr/bin:/bin", "NODE": "1", "LD_LIBRARY_PATH": "/cuda"}
    seen = placed_environment(caller, {}, node, {"SUBLET_HOME": "/node"})
    assert seen == {
        "HOME": "/root",
        "API_KEY": "k",
        "PATH": "/venv/bin:/bin:/usr/bin",
        "ONLY": "here",
        "NODE": "1",
        "LD_LIBRARY_PATH": "/cuda",
        "SUBLET_HOME": "/node",
    }


def test_what_was_named_for_the_command_counts_as_it_stands() -> None:
    seen = placed_environment(
        {"TMPDIR": "/a"}, {"TMPDIR": "/b", "SUBLET_HOME": "/c"}, {"TMPDIR": "/d"}, {"SUBLET_HOME": "/e"}
    )
    assert seen == {"TMPDIR": "/b", "SUBLET_HOME": "/e"}


def test_a_folder_is_in_a_list_once() -> None:
    assert folders("/a::/b", "/b:/c:") == "/a:/b:/c"
    assert folders("", "") == ""
