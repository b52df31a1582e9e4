"""``python -m tests.compose``: the compose files put to the test, from images to teardown."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from demo.stage import MismatchError, Stage

from . import images
from .cluster import Cluster
from .engine import EngineError, Project, compose_command, engine_answers, remove_named, run
from .story import SAMPLE_ROWS, Story

PREFIX = "koinon-test-"
PATIENT = "--lease-ms 3000 --session-timeout-ms 4000 --check-quorum-ms 900"
"""Eight servers and a load on a few cores, among them those of a build machine, would now and then
end a lease of a second by themselves."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    tested = actions.add_parser("test", help="everything, on a cluster of its own")
    image = actions.add_parser("image", help="only make the images that compose.yaml names")
    for action in (tested, image):
        action.add_argument("--spark", action="store_true", help="Spark's as well")
    tested.add_argument("--plain", action="store_true", help="without compose.tls.yaml")
    actions.add_parser("clean", help="remove what runs have left, and what they keep")
    options = parser.parse_args()
    if not engine_answers():
        print("did not run: no Docker Engine answers ('docker info' says why)")
        return 1
    if options.action == "clean":
        return clean()
    if options.action == "test":
        return test(spark=options.spark, secured=not options.plain)
    return image_only(options.spark)


def test(*, spark: bool, secured: bool) -> int:
    """Tell the story; save logs if it goes wrong; remove what it made."""
    signal.signal(signal.SIGTERM, _interrupt)
    stage = Stage()
    project = Project(
        f"{PREFIX}{os.getpid()}",
        {
            "KOINON_IMAGE": images.NAME,
            "KOINON_COORDINATOR_FLAGS": PATIENT,
            "KOINON_PROMETHEUS_PORT": "0",
            "KOINON_GRAFANA_PORT": "0",
            "KOINON_SAMPLE_ROWS": str(SAMPLE_ROWS),
        },
    )
    if secured:
        project.files.append("compose.tls.yaml")
    cluster = Cluster(project)
    told = False
    try:
        engine = run("docker", "version", "--format", "{{.Server.Version}}")
        stage.say(f"Docker Engine {engine}, {' '.join(compose_command())}; project {project.name}")
        Story(stage, cluster, spark=spark).tell()
        told = True
    except (EngineError, MismatchError, images.MissingToolError) as error:
        print(f"\ncompose-test failed: {error}", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if not told:
                _save_logs(cluster)
        finally:
            cluster.tear_down()
    stage.act("The end")
    stage.say("containers, volumes and network are removed")
    stage.say("images and downloads stay for the next run; `make compose-clean` removes them")
    if not told:
        return 1
    minutes, seconds = divmod(int(stage.seconds), 60)
    stage.say(f"{stage.checks} checks held, {minutes} min {seconds} s")
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _save_logs(cluster: Cluster) -> None:
    directory = Path(tempfile.mkdtemp(prefix="koinon-compose-logs-"))
    try:
        cluster.save_logs(directory)
    except EngineError as error:
        print(f"not all logs could be saved: {error}")
    print(f"logs of all containers: {directory}", flush=True)


def image_only(spark: bool) -> int:
    """Make the images under the names that compose.yaml gives them unless told otherwise."""
    try:
        images.have_base(print)
        images.have_wheels(print, spark=spark)
        images.build_koinon()
        images.build_faults()
        named = {images.NAME: "koinon", f"{images.NAME}-faults": "koinon-faults"}
        if spark:
            images.build_spark()
            named[f"{images.NAME}-spark"] = "koinon-spark"
        for built, name in named.items():
            images.tag(built, name)
            print(f"image {name}: {images.size_mb(name):,.0f} MB")
    except (EngineError, images.MissingToolError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def clean() -> int:
    """Remove what interrupted runs left running, and what all runs keep for the next."""
    for name in remove_named(PREFIX):
        print(f"removed {name}")
    for name in images.remove():
        print(f"removed the image {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
