"""Draws the pictures of the gallery, or of some programs: python docs/gallery/pictures.py [FOLDER [PROGRAM ...]].

Each program is run as it stands, and its picture shows what it has printed or computed. Needs
Matplotlib.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

import pathspace as ps

GALLERY = Path(__file__).parent
FOLDER = GALLERY.parent / "images" / "gallery"
BLUE, RED, GREEN, GREY, BLACK = "#1f5fa8", "#b3400e", "#2e7d32", "#b9bdc4", "#222222"
Namespace = dict[str, Any]


def panels(count: int, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side."""
    figure = Figure(figsize=(3.6 * count, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = [figure.add_subplot(1, count, 1 + i) for i in range(count)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bars(
    axes: Axes, names: list[str], values: list[float], title: str, *, form: str = "{:g}"
) -> None:
    """Horizontal bars with their values behind them."""
    axes.barh(range(len(names)), values, color=[BLUE, RED, GREEN, GREY][: len(names)])
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.margins(x=0.2)
    for place, value in enumerate(values):
        axes.text(value, place, " " + form.format(value), va="center", fontsize=9)


def badly_scaled(namespace: Namespace, _: str) -> Figure:
    """Losses of both rules from both starts."""
    figure, axes = panels(2)
    for one, (name, rule) in zip(axes, namespace["methods"].items(), strict=True):
        for start, colour, width in (("good", BLUE, 3.5), ("bad", RED, 1.2)):
            model = copy.deepcopy(namespace[start])
            optimizer = rule(model, ps.trace(model, namespace["x"]))
            losses = []
            for _step in range(200):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(namespace["x"]), namespace["y"])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            one.semilogy(
                [loss for loss in losses if loss < 1e6],
                color=colour,
                lw=width,
                label=f"{start} start",
            )
        one.set_title(name, fontsize=10)
        one.set_xlabel("step")
        one.set_ylim(1e-2, 1e2)
    axes[0].set_ylabel("loss")
    axes[0].legend(frameon=False)
    return figure


def equalize(namespace: Namespace, printed: str) -> Figure:
    """Outputs after both equalizations over what they were."""
    figure, axes = panels(2, 3.2)
    shares = re.findall(r"moved by (\S+)", printed)
    models = {"told pairs of layers": namespace["told"], "read off the model": namespace["model"]}
    x, expected = namespace["x"][::4], namespace["expected"][::4].flatten()
    for one, (name, model), share in zip(axes, models.items(), shares, strict=True):
        with torch.no_grad():
            one.scatter(expected, model(x).flatten(), s=8, color=BLUE)
        one.plot(
            [expected.min(), expected.max()],
            [expected.min(), expected.max()],
            color=GREY,
            lw=1,
            zorder=0,
        )
        one.set_title(f"{name}: moved by {share}", fontsize=10)
        one.set_xlabel("output before")
    axes[0].set_ylabel("output after")
    return figure


def hand_written_recurrence(namespace: Namespace, _: str) -> Figure:
    """kappa of the recurrent weights, and its second term beside it."""
    figure, axes = panels(2, 3.0)
    first, second = namespace["first"].detach(), namespace["second"].detach()
    for one, title, values in (
        (axes[0], "kappa of the recurrent weights", first),
        (axes[1], "kappa2 / kappa1", second / first),
    ):
        image = one.pcolormesh(values.flip(0), cmap="Blues", edgecolors="white", lw=0.5)
        figure.colorbar(image, ax=one)
        one.set_title(title, fontsize=10)
        one.set_aspect("equal")
        one.set_axis_off()
    return figure


def path_regularizer(_: Namespace, printed: str) -> Figure:
    """Training error and path norm with and without it."""
    rows = re.findall(r"strength (\S+): training error (\S+), gamma_net\^2 (\S+)", printed)
    figure, axes = panels(2, 1.7)
    names = [f"strength {strength}" for strength, _, _ in rows]
    bars(axes[0], names, [float(error) for _, error, _ in rows], "training error")
    bars(axes[1], names, [float(norm) for _, _, norm in rows], "squared path norm")
    axes[1].set_yticks([])
    return figure


def path_space(_: Namespace, printed: str) -> Figure:
    """Training loss after five epochs of every rule."""
    rows = re.findall(r"^(\S.*?) +rate \S+ +loss +(\S+)  error +(\S+) %", printed, re.M)
    figure, (axes,) = panels(1, 3.2)
    figure.set_figwidth(6.5)
    for place, (name, loss, error) in enumerate(rows):
        colour = GREY if "once" in name else BLUE
        axes.plot([1e-2, float(loss)], [place, place], color=GREY, lw=1, zorder=0)
        axes.scatter(float(loss), place, color=colour, s=40)
        axes.text(float(loss) * 1.15, place, f"{error} %", va="center", fontsize=8)
        axes.text(9e-3, place, name, va="center", ha="right", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(1e-2, 6)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("training loss (beside it: test error)")
    return figure


def paths_of_a_network(namespace: Namespace, _: str) -> Figure:
    """The network written out over its steps, with one longest path."""
    figure, (axes,) = panels(1, 3.0)
    figure.set_figwidth(7.2)
    steps, units, inputs = 5, 3, 2
    taken = namespace["paths"].edges[namespace["longest"]]
    along = [index for _, index in taken]  # into a unit, from unit to unit, out
    states = [unit for unit, _ in along[:-1]]
    for t in range(steps):
        for i in range(inputs):
            place = (t - 0.3 + 0.6 * i, -1.0)
            axes.text(place[0], -1.25, f"x{i + 1}", ha="center", va="center", fontsize=9)
            for j in range(units):
                _line(axes, place, (t, j), on=t == 0 and (j, i) == along[0])
        for j in range(units):
            axes.scatter(t, j, s=260, color="white", edgecolors=BLACK, zorder=3)
            for k in range(units if t else 0):
                _line(axes, (t - 1, k), (t, j), on=(states[t - 1], states[t]) == (k, j))
            if t == steps - 1:
                _line(axes, (t, j), (steps, 1.0), on=states[-1] == j)
        axes.text(t, -1.7, f"t = {t + 1}", ha="center", fontsize=9)
    axes.scatter(steps, 1.0, s=260, color="white", edgecolors=BLACK, zorder=3)
    axes.text(steps, 1.0, "f", ha="center", va="center", zorder=4, fontsize=9)
    axes.set_ylim(-1.9, units - 0.6)
    axes.set_axis_off()
    axes.set_title(
        f"{len(namespace['paths'])} paths, {len(namespace['basis'].edges)} of them independent",
        fontsize=10,
    )
    return figure


def _line(axes: Axes, start: tuple[float, float], end: tuple[float, float], *, on: bool) -> None:
    axes.plot(
        *zip(start, end, strict=True),
        color=RED if on else GREY,
        lw=2.4 if on else 0.8,
        zorder=2 if on else 1,
    )


def published_defects(_: Namespace, printed: str) -> Figure:
    """How far the steps of path space with a slip are from the right one, and two Adams."""
    figure, axes = panels(2, 2.2)
    figure.set_figwidth(9.5)
    steps = re.findall(r"^   (\S.*?) +([\d.]+) %$", printed, re.M)
    bars(
        axes[0],
        [n for n, _ in steps],
        [float(v) for _, v in steps],
        "step in path space: off by, %",
    )
    adams = re.findall(r"^   (Adam .*?) +(\S+)$", printed, re.M)
    names = [name.replace(" in the", "\nin the").replace(" fed", "\nfed") for name, _ in adams]
    bars(axes[1], names, [float(v) for _, v in adams], "outputs of two members differ by")
    return figure


def quantise(_: Namespace, printed: str) -> Figure:
    """Test errors of every member, as it is and rounded."""
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+) +(\d+) +[\d.]+ +[\d.]+$", printed, re.M)
    figure, (axes,) = panels(1, 2.6)
    figure.set_figwidth(6)
    for offset, (form, colour) in enumerate((("float", GREY), ("int8", BLUE), ("int4", RED))):
        values = [int(row[1 + offset]) for row in rows]
        places = [place + 0.27 * (offset - 1) for place in range(len(rows))]
        axes.bar(places, values, 0.25, color=colour, label=form)
        for place, value in zip(places, values, strict=True):
            axes.text(place, value, str(value), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylabel("test errors of 397")
    axes.legend(frameon=False)
    return figure


PICTURES: dict[str, Callable[[Namespace, str], Figure]] = {
    draw.__name__: draw
    for draw in (
        badly_scaled, equalize, hand_written_recurrence, path_regularizer, path_space, paths_of_a_network,
        published_defects, quantise,
    )
}  # fmt: skip


def main(folder: Path = FOLDER, names: list[str] | None = None) -> None:
    """Run the programs and write their pictures into a folder."""
    mpl.rcParams["svg.fonttype"] = "none"  # letters stay letters, in a font of the reader's
    mpl.rcParams["svg.hashsalt"] = "pathspace"
    mpl.rcParams["font.family"] = "sans-serif"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in names or PICTURES:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            namespace = runpy.run_path(str(GALLERY / f"{name}.py"), run_name="__main__")
        figure = PICTURES[name](namespace, out.getvalue())
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(*(Path(folder) for folder in sys.argv[1:2]), names=sys.argv[2:] or None)
