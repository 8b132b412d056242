"""A synthetic log of a web server: lines in Apache's combined format, from sessions of visitors.

Visitors come with an address and a browser, both drawn by Zipf's law, read a page with what belongs
to it, and go on to another. Dates rise, sizes belong to paths, one request in fifty fails. Real
logs have more kinds of noise.

    python benchmarks/server_log.py --megabytes 2 > access.log
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime, timedelta

import numpy as np

WORDS = (
    *(
        "about",
        "account",
        "admin",
        "archive",
        "article",
        "basket",
        "blog",
        "careers",
        "catalog",
        "checkout",
        "cloud",
    ),
    *(
        "contact",
        "data",
        "docs",
        "download",
        "events",
        "feed",
        "forum",
        "gallery",
        "guide",
        "help",
        "home",
        "images",
    ),
    *(
        "index",
        "install",
        "issues",
        "jobs",
        "legal",
        "login",
        "mail",
        "media",
        "network",
        "news",
        "orders",
        "pages",
    ),
    *(
        "partners",
        "pricing",
        "privacy",
        "product",
        "profile",
        "project",
        "release",
        "report",
        "research",
        "review",
    ),
    *(
        "search",
        "security",
        "server",
        "service",
        "settings",
        "shop",
        "status",
        "store",
        "support",
        "system",
        "team",
    ),
    *("terms", "tools", "tour", "travel", "update", "users", "video", "weather", "wiki"),
)
AGENTS = (
    "Mozilla/5.0 (Windows NT {n}.1; WOW64) AppleWebKit/537.{m} (KHTML, like Gecko) Chrome/{v}.0.{b}.107 Safari/537.{m}",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_{n}) AppleWebKit/537.{m} (KHTML, like Gecko) Version/{n}.0 Safari/{b}",
    "Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:{v}.0) Gecko/20100101 Firefox/{v}.0",
    "Mozilla/5.0 (iPhone; CPU iPhone OS {n}_{v} like Mac OS X) AppleWebKit/{b}.1 (KHTML, like Gecko) Mobile/11B{b}",
    "Mozilla/5.0 (compatible; Googlebot/2.{n}; +http://www.google.com/bot.html)",
    "curl/7.{v}.0",
)


def zipf(rng: np.random.Generator, size: int, power: float = 1.0) -> int:
    """Return 0..size-1, k with a probability proportional to 1/(k+1)^power."""
    weights = 1.0 / np.arange(1, size + 1) ** power
    return int(rng.choice(size, p=weights / weights.sum()))


def generate(rng: np.random.Generator, size: int) -> bytes:
    """Return the first ``size`` bytes of a log."""
    paths, sizes = [], []
    for _ in range(400):
        depth = 1 + rng.integers(3)
        path = "/" + "/".join(WORDS[zipf(rng, len(WORDS), 0.5)] for _ in range(depth))
        paths.append(
            path
            + (f"/{rng.integers(1000)}" if rng.random() < 0.3 else "")
            + ("" if depth > 1 else ".html")
        )
        sizes.append(int(np.exp(rng.normal(8.5, 1.2))))
    belongings = [
        [
            f"/static/{WORDS[rng.integers(len(WORDS))]}.{end}"
            for end in rng.choice(["css", "js", "png", "jpg"], 4)
        ]
        for _ in range(30)
    ]
    agents = []
    for _ in range(300):
        n, m, v, b = (
            int(rng.integers(*ends)) for ends in ((5, 10), (30, 37), (20, 36), (1500, 1800))
        )
        agents.append(AGENTS[zipf(rng, len(AGENTS))].format(n=n, m=m, v=v, b=b))
    visitors = [
        (".".join(str(part) for part in rng.integers(1, 255, 4)), agents[zipf(rng, len(agents))])
        for _ in range(2500)
    ]
    now, lines, written = datetime(2026, 3, 2, tzinfo=UTC), [], 0
    # visitor, page before, page that is being read, requests left of it
    open_sessions: list[list[int]] = []
    while written < size:
        now += timedelta(seconds=float(rng.exponential(2.0)))
        if len(open_sessions) < 20 or rng.random() < 0.05:
            open_sessions.append([zipf(rng, len(visitors), 0.8), -1, zipf(rng, len(paths)), 0])
        k = int(rng.integers(len(open_sessions)))
        visitor, before, page, left = open_sessions[k]
        address, agent = visitors[visitor]
        if left:
            path = belongings[page % len(belongings)][left - 1]
            length, came = (
                300 + 37 * (len(path) * 101 % 997),
                f"http://www.example.com{paths[page]}",
            )
        else:
            path, length = paths[page], sizes[page]
            if rng.random() < 0.3:
                path, length = f"{path}?id={rng.integers(100000)}", length + int(rng.integers(500))
            came = f"http://www.example.com{paths[before]}" if before >= 0 else "-"
        status = 200
        if rng.random() < 0.02:
            status, length = (404, 162) if rng.random() < 0.7 else (500, 612)
        elif left and rng.random() < 0.2:
            status, length = 304, 0
        asked = f'"GET {path} HTTP/1.1" {status} {length or "-"} "{came}" "{agent}"'
        line = f"{address} - - [{now:%d/%b/%Y:%H:%M:%S} +0000] {asked}\n"
        lines.append(line)
        written += len(line)
        if left > 1:
            open_sessions[k][3] -= 1
        elif left == 0 and rng.random() < 0.5:
            open_sessions[k][3] = 4
        elif rng.random() < 0.3:
            open_sessions.pop(k)
        else:
            open_sessions[k] = [visitor, page, zipf(rng, len(paths)), 0]
    return "".join(lines).encode()[:size]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.stdout.buffer.write(
        generate(np.random.default_rng(arguments.seed), int(arguments.megabytes * 1e6))
    )


if __name__ == "__main__":
    main()
