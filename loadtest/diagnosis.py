"""How good is the diagnosis? `python -m loadtest.diagnosis DIR [-v] [--ids even|odd] [--blind]`.

DIR holds labelled logs: `manifest.jsonl` (id, class, evidence_line, phase, needs_restart,
remedy_flags) and `ID.log` files. Prints accuracy per class, evidence found, false alarms, how many
sure answers are wrong, and what was confused with what.

`--blind` takes all rules of a log's own class away before it is read: what is left is what a class
gets that has no words yet.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from gateway.vllmlog import search
from gateway.vllmlog.diagnosis import Confidence, Diagnosis, diagnose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="show each miss")
    parser.add_argument("--ids", choices=("all", "even", "odd"), default="all")
    parser.add_argument("--quiet-misses", action="store_true", help="no list of confusions")
    parser.add_argument("--blind", action="store_true", help="without the rules of its own class")
    options = parser.parse_args()
    labels = [
        json.loads(line)
        for line in (options.folder / "manifest.jsonl").read_text().splitlines()
        if line
    ]
    parity = {"even": 0, "odd": 1}.get(options.ids)
    labels = [each for each in labels if parity is None or int(each["id"]) % 2 == parity]
    began = time.perf_counter()
    answers = {each["id"]: answer(each, options) for each in labels}
    took_s = time.perf_counter() - began
    report(labels, answers, options)
    print(f"{len(labels)} logs in {took_s:.2f} s")


def answer(label: dict[str, Any], options: argparse.Namespace) -> Diagnosis:
    """Diagnose one log, blind if that is asked for."""
    log = (options.folder / f"{label['id']}.log").read_bytes()
    own = label["class"] if options.blind else ""
    known = tuple(each for each in search.COMPILED if each[0].kind.value != own)
    with mock.patch.object(search, "COMPILED", known):
        return diagnose(log)


def report(
    labels: list[dict[str, Any]], answers: dict[str, Diagnosis], options: argparse.Namespace
) -> None:
    total, right = Counter[str](), Counter[str]()
    evidence = phase = restart = restart_of = flags = flags_of = alarms = sure = sure_wrong = 0
    confused = []
    for label in labels:
        answer = answers[label["id"]]
        total[label["class"]] += 1
        hit = answer.kind.value == label["class"]
        right[label["class"]] += hit
        found = same_line(answer.evidence, label["evidence_line"])
        evidence += found
        sure += answer.confidence is Confidence.HIGH
        sure_wrong += answer.confidence is Confidence.HIGH and not hit
        phase += answer.when.value == label["phase"]
        alarms += label["class"] == "healthy" and not answer.healthy
        if label["needs_restart"] is not None:
            restart_of += 1
            restart += answer.restart_helps == label["needs_restart"]
        if wanted := names(label.get("remedy_flags", [])):
            flags_of += 1
            flags += bool(wanted & {each.flag for each in answer.remedies})
        if not (hit and found) or options.verbose and answer.when.value != label["phase"]:
            confused.append((label, answer, hit, found))
    if not options.quiet_misses:
        for name, count in total.most_common():
            print(f"  {name:42} {right[name]:3} of {count:3}")
        for label, answer, hit, found in confused:
            print(
                f"  {label['id']} {label['class']} -> {answer.kind.value} ({answer.rule or '-'}, "
                f"{answer.when.value}){'' if hit else '  CLASS'}{'' if found else '  EVIDENCE'}"
            )
            if options.verbose:
                print(
                    f"      label:  {label['evidence_line'][:150]}\n      answer: {answer.evidence[:150]}"
                )
    n = len(labels)
    healthy = total["healthy"]
    print(
        f"class {sum(right.values())}/{n} = {sum(right.values()) / n:.1%}, evidence {evidence}/{n} = "
        f"{evidence / n:.1%}, false alarms {alarms}/{healthy}, sure but wrong {sure_wrong}/{sure}"
    )
    print(
        f"phase {phase}/{n} = {phase / n:.1%}, restart {restart}/{restart_of}, a remedy flag of the "
        f"label's {flags}/{flags_of}"
    )


def same_line(evidence: str, label: str) -> bool:
    """Tell whether one contains the other, spaces aside."""
    ours, theirs = " ".join(evidence.split()), " ".join(label.split())
    return bool(ours) and (theirs in ours or ours in theirs)


def names(remedies: list[str]) -> set[str]:
    """Return the flags and variables that a label's remedies name."""
    return {
        name
        for text in remedies
        for name in re.findall(r"--[a-z][\w-]+|\b[A-Z][A-Z0-9]+_[A-Z0-9_]+", text)
    }


if __name__ == "__main__":
    main()
