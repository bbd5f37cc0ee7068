"""A picture shows the numbers that an observation has, and says what it cannot draw."""

import subprocess
import sys
import warnings

import pytest
import torch

import regard
from regard import plots
from regard.biases import Alibi
from regard.configuration import ModelConfig
from regard.masks import Causal, Padding
from regard.models import Decoder
from regard.observation import observe
from regard.recording import Recording, record

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import patches  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

LENGTH = 7


@pytest.fixture(autouse=True)
def _no_figure_stays_open():
    yield
    plt.close("all")


def observed(heads=3, query_len=LENGTH, key_len=LENGTH, **arguments):
    return observe(torch.randn(2, heads, query_len, 5), torch.randn(2, heads, key_len, 5), **arguments)


def words(length=LENGTH):
    return [f"w{i}" for i in range(length)]


def shown(axes):
    """What an axes' one image holds."""
    (image,) = axes.images
    return torch.tensor(image.get_array().tolist())


def drawn(figure):
    """Draws all of it, so that whatever is wrong with it is said."""
    figure.canvas.draw()
    return figure


# --- heat maps --------------------------------------------------------------------------------------------------------


def test_a_heat_map_shows_the_weights_of_its_head_and_row():
    seen = observed(mask=Causal())
    axes = plots.heat_map(seen.head(2), row=1, labels=words())
    assert torch.allclose(shown(axes), seen.weights()[1, 2])
    assert list(axes.images[0].get_extent()) == [-0.5, 6.5, 6.5, -0.5]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert float(axes.images[0].norm(0.25)) == pytest.approx(0.5)  # colour goes by the root of a weight
    for axis in (axes.xaxis, axes.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == words()
    drawn(axes.figure)


def test_queries_after_a_cache_have_the_labels_of_the_last_tokens():
    axes = plots.heat_map(observed(heads=1, query_len=3), labels=words())
    assert [label.get_text() for label in axes.yaxis.get_ticklabels()] == ["w4", "w5", "w6"]
    axes = plots.heat_map(observed(heads=1, query_len=7, key_len=7))
    assert "w0" not in [label.get_text() for label in axes.xaxis.get_ticklabels()]
    with pytest.raises(ValueError, match=r"plots.heat_map: there are 7 tokens, got 5 labels"):
        plots.heat_map(observed(heads=1), labels=words(5))


def test_it_is_drawn_where_it_is_told_to_be():
    figure, (left, right) = plt.subplots(1, 2)
    seen = observed(heads=1)
    assert plots.heat_map(seen, axes=left) is left
    assert plots.arcs(seen, axes=right) is right
    assert plots.entropy(seen, axes=right) is right
    assert plots.received(seen, axes=right) is right
    assert plt.get_fignums() == [figure.number]


def test_tokens_are_written_as_they_are():
    seen = observed(heads=1, query_len=3, key_len=3)
    axes = plots.heat_map(seen, labels=["$x_1$", "a\n\tb", r"\frac"])
    assert [label.get_text() for label in axes.xaxis.get_ticklabels()] == [r"\$x_1\$", r"a\n\tb", r"\frac"]
    drawn(axes.figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font may lack a letter
        drawn(plots.arcs(seen, labels=["$x", "y$", "文"]).figure)


def test_a_long_text_is_drawn_pooled_and_no_lone_weight_is_lost(monkeypatch):
    monkeypatch.setattr(plots, "MAX_SIDE_CELLS", 16)
    length, place = 1000, (777, 123)
    query = torch.zeros(1, 1, length, 2)
    query[..., place[0], 0] = 50.0
    key = torch.zeros(1, 1, length, 2)
    key[..., place[1], 0] = 50.0
    seen = observe(query, key, mask=Causal())
    axes = plots.heat_map(seen)
    image = shown(axes)
    assert max(image.shape) <= 16
    assert list(axes.images[0].get_extent()) == [
        -0.5,
        1007.5,
        1007.5,
        -0.5,
    ]  # 16 pixels of 63 tokens, the last cut short
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 999.5), (999.5, -0.5))
    assert float(image[place[0] // 63, place[1] // 63]) == pytest.approx(1, abs=1e-3)
    drawn(plots.head_grid(seen, cells=16))


# --- every head -------------------------------------------------------------------------------------------------------


def model():
    return Decoder(ModelConfig(vocab_size=11, context_length=13, dim=12, layers=2, heads=3, hidden_dim=5))


def test_a_grid_has_every_head_of_every_layer_in_its_place():
    model_ = model()
    with record(model_) as recording:
        model_(torch.randint(11, (2, LENGTH)))
    figure = drawn(plots.head_grid(recording, row=1))
    assert len(figure.axes) == 6
    for number, axes in enumerate(figure.axes):
        layer, head = divmod(number, 3)
        assert torch.allclose(shown(axes), recording[layer].weights()[1, head])
        assert axes.get_title() == f"head {head}"
        assert axes.get_ylabel() == (f"layers.{layer}" if head == 0 else "")


def test_heads_that_were_chosen_keep_their_numbers():
    model_ = model()
    with record(model_, heads=[2, 0]) as recording:
        model_(torch.randint(11, (1, LENGTH)))
    assert [axes.get_title() for axes in plots.head_grid(recording[0]).axes] == ["head 2", "head 0"]
    labels = [text.get_text() for text in plots.received(recording[0]).get_legend().get_texts()]
    assert labels == ["head 2", "head 0"]


def test_layers_with_fewer_heads_leave_places_empty():
    figure = drawn(plots.head_grid({"a": observed(heads=1), "b": observed(heads=3)}))
    assert [len(axes.images) for axes in figure.axes] == [1, 0, 0, 1, 1, 1]


# --- arcs -------------------------------------------------------------------------------------------------------------


def test_there_is_an_arc_for_every_weight_that_is_large_enough():
    seen = observed(mask=Causal())
    weights = seen.weights()[1, 2]
    axes = plots.arcs(seen.head(2), row=1, labels=words(), least=0.2)
    widths = {
        (round(p.center[0] - p.width / 2), round(p.center[0] + p.width / 2)): p.get_linewidth() for p in axes.patches
    }
    wanted = {(j, i) for i, j in (weights >= 0.2).nonzero().tolist() if i != j}
    assert set(widths) == wanted
    assert len(axes.patches) == len(wanted) > 0
    assert all(isinstance(p, patches.Arc) for p in axes.patches)
    rings = {int(line.get_xdata()[0]) for line in axes.lines}
    assert rings == {i for i in range(LENGTH) if weights[i, i] >= 0.2}
    by_weight = sorted(wanted, key=lambda pair: float(weights[pair[1], pair[0]]))
    assert sorted(wanted, key=lambda pair: widths[pair]) == by_weight
    drawn(axes.figure)


def test_arcs_of_a_part_of_the_text():
    seen = observed(heads=1, mask=Causal())
    axes = plots.arcs(seen, labels=words(), places=slice(2, 6), least=0.0)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["w2", "w3", "w4", "w5"]
    assert len(axes.patches) == 4 * 3
    axes = plots.arcs(seen, places=range(2, 6))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "3", "4", "5"]


def test_what_arcs_cannot_draw_is_refused():
    long = observed(heads=1, query_len=200, key_len=200)
    with pytest.raises(ValueError, match=r"places must lie in 0 to 200, 128 at most, got 0 to 200; choose some"):
        plots.arcs(long)
    for places in (range(-1, 5), range(5, 5), range(190, 201), range(0, 10, 2)):
        with pytest.raises(ValueError, match=r"plots\.arcs: places must lie in 0 to 200"):
            plots.arcs(long, places=places)
    with pytest.raises(ValueError, match=r"draws a text that attends to itself, got the scores .*query_len=3"):
        plots.arcs(observed(heads=1, query_len=3))


# --- curves -----------------------------------------------------------------------------------------------------------


def test_curves_show_every_heads_statistic():
    seen = observed(mask=Causal(), bias=Alibi(3))
    axes = plots.entropy(seen, row=1)
    even, *lines = axes.lines
    assert torch.allclose(torch.tensor(even.get_ydata()), torch.arange(1, LENGTH + 1).float().log())
    for head, line in enumerate(lines):
        assert torch.allclose(torch.tensor(line.get_ydata()), seen.entropy()[1, head])
    axes = plots.received(seen, row=1)
    assert axes.get_yscale() == "log"
    for head, line in enumerate(axes.lines):
        assert torch.allclose(torch.tensor(line.get_ydata()), seen.received()[1, head])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["head 0", "head 1", "head 2"]
    drawn(axes.figure)


def test_keys_that_get_nothing_and_queries_that_see_nothing_are_drawn():
    seen = observed(mask=Padding([3, 0]))
    for row in (0, 1):
        for draw in (plots.entropy, plots.received):
            drawn(draw(seen, row=row).figure)
        drawn(plots.heat_map(seen.head(0), row=row).figure)
        drawn(plots.arcs(seen.head(0), row=row).figure)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_several_heads_or_a_row_that_is_not_there_are_refused():
    seen = observed()
    for name in ("heat_map", "arcs"):
        with pytest.raises(ValueError, match=rf"plots\.{name}: draws one head, got 3; choose one: seen\.head\(0\)"):
            getattr(plots, name)(seen)
    for name in ("heat_map", "arcs", "head_grid", "entropy", "received"):
        for row in (2, -1):
            with pytest.raises(ValueError, match=rf"plots\.{name}: row must be 0 to 1, got {row}"):
                getattr(plots, name)(seen.head(0), row=row)
        with pytest.raises(ValueError, match=rf"plots\.{name}: there is nothing to draw"):
            getattr(plots, name)(observed(heads=1, key_len=0))
    with pytest.raises(ValueError, match="nothing was recorded"):
        plots.head_grid(Recording())


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in ("heat_map", "arcs", "head_grid", "entropy", "received"):
        with pytest.raises(ImportError, match=r"regard\.plots needs matplotlib .*: pip install '\.\[plot\]'"):
            getattr(plots, name)(observed(heads=1))


def test_matplotlib_is_imported_when_something_is_drawn():
    code = "import sys, regard.plots; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_weight_that_rounds_to_more_than_1_is_drawn(monkeypatch):
    seen = observed(heads=1, mask=Causal())
    real = seen.weights
    monkeypatch.setattr(type(seen), "weights", lambda self, *a, **k: real(*a, **k) * (1 + 3e-6) + 1e-6)
    for draw in (plots.arcs, plots.heat_map):
        drawn(draw(seen).figure)


def test_arcs_of_every_head_of_the_bundled_model_can_be_drawn():
    model = regard.load("stdlib").model
    tokens = torch.randint(1000, (1, 48), generator=torch.Generator().manual_seed(0))
    with record(model) as recording, torch.no_grad():
        model(tokens)
    for layer in recording.values():
        for head in range(layer.grid.heads):
            plots.arcs(layer.head(head))
            plt.close("all")


@pytest.mark.parametrize("draw", [plots.heat_map, plots.arcs, plots.entropy, plots.received, plots.head_grid])
def test_what_is_no_observation_is_refused_with_where_one_comes_from(draw):
    for wrong in (torch.zeros(3, 3), None, "layer", [1.0], Causal()):
        with pytest.raises(TypeError, match=rf"^plots.{draw.__name__}: seen must be .*, got .*; regard.observe\("):
            draw(wrong)
    if draw is not plots.head_grid:
        with pytest.raises(TypeError, match=r"choose a layer and a head: recording\[name\].head\(0\)"):
            draw({"layers.0": observed()})


def test_labels_rows_and_axes_are_what_they_must_be():
    seen = observed(heads=1)
    for draw in (plots.heat_map, plots.arcs):
        with pytest.raises(TypeError, match="labels must be the tokens as text, a list of str, got"):
            draw(seen, labels=list(range(LENGTH)))
        with pytest.raises(TypeError, match="labels must be the tokens as text, a list of str, got 'abcdefg'"):
            draw(seen, labels="abcdefg")
        with pytest.raises(ValueError, match="there are 7 tokens, got 2 labels"):
            draw(seen, labels=["a", "b"])
        for row in ("0", None, 0.0, True):
            with pytest.raises(ValueError, match="row must be 0 to 1, got"):
                draw(seen, row=row)
        with pytest.raises(TypeError, match=r"axes must be axes of matplotlib, .* got 3"):
            draw(seen, axes=3)
    with pytest.raises(ValueError, match="least must be a number"):
        plots.arcs(seen, least="much")
    with pytest.raises(ValueError, match="cells must be a whole number, 1 or more, got 0"):
        plots.head_grid(seen, cells=0)
