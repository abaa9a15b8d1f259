"""The workflows of CI: a job does nothing that a developer could not do with make."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))


def jobs(workflow: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())["jobs"]


def targets(job: dict[str, Any]) -> Iterator[str]:
    """The make targets that a job calls; those of its matrix too."""
    for step in job["steps"]:
        words = str(step.get("run", "")).split()
        for word in words[1:] if words[:1] == ["make"] else ():
            if word == "${{":
                yield from (each["target"] for each in job["strategy"]["matrix"]["include"])
                break
            yield word


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_job_calls_make(workflow: Any) -> None:
    """But those that call .ci/run, which calls make, and those that only upload what another job has made."""
    for name, job in jobs(workflow.name).items():
        called = list(targets(job))
        assert set(called) <= TARGETS, name
        assert called or name in {"merge", "test", "publish", "attach"}, name


def test_a_merge_is_tried_on_every_python_of_the_classifiers() -> None:
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    found = jobs("ci.yml")
    tried = {each["python"] for each in found["pythons"]["strategy"]["matrix"]["include"]}
    tried |= {step["with"]["python-version"] for step in found["merge"]["steps"] if "with" in step}
    assert tried == set(supported)


def test_each_week_the_oldest_and_the_newest_versions_are_tried() -> None:
    assert {"test-oldest", "test-newest"} <= set(targets(jobs("ci.yml")["weekly"]))


def test_a_release_tries_each_extra_of_the_wheel_that_it_uploads() -> None:
    """In the job, and in the call of make, that builds what is uploaded: a second build would be another file."""
    assert list(targets(jobs("release.yml")["build"])) == ["wheels-extras", "sbom"]
    assert re.search(r"^wheels-extras: wheels ", MAKEFILE, re.MULTILINE)


def test_only_the_job_that_uploads_may_speak_for_the_project() -> None:
    """It runs no code of the repository, and gets what was built and checked."""
    found = jobs("release.yml")
    assert {name for name, job in found.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    assert found["publish"]["environment"]
    assert found["publish"]["needs"] == ["test", "build"]
    assert not [step for step in found["publish"]["steps"] if "run" in step]
