"""Recipes: what is read, what is refused and with which suggestion; the recipes of the repository."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hf_speculate_training.run import build_method, read_recipe, recipe_from, training_arguments
from hf_speculate_training.sections import RecipeError
from tests.support.training import recipe_file


RECIPES = sorted((Path(__file__).resolve().parents[3] / "training" / "recipes").glob("*.yaml"))


def test_sections_are_typed_and_defaults_filled_in(recipe_values):
    recipe = recipe_from(recipe_values)
    assert recipe.target.dtype == "auto"
    assert recipe.data.packing is True
    assert recipe.evaluation.nodes == [4]
    assert recipe.features.source == "online"


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", ".1e-3", "10e-5", "0.0001"])
def test_numbers_with_exponents_are_numbers(recipe_values, tmp_path, text):
    path = recipe_file(recipe_values, tmp_path)
    recipe = read_recipe(path, [f"training.learning_rate={text}", f"evaluation.temperatures=[{text}]"])
    assert training_arguments(recipe).learning_rate == pytest.approx(1e-4, rel=1e-12)
    assert recipe.evaluation.temperatures == pytest.approx([1e-4], rel=1e-12)


def test_version_like_texts_stay_texts(recipe_values, tmp_path):
    recipe = read_recipe(recipe_file(recipe_values, tmp_path), ["target.revision='1e5'", "output.notes=e5"])
    assert recipe.target.revision == "1e5"
    assert recipe.output.notes == "e5"


def test_overrides_win_and_make_sections(recipe_values, tmp_path):
    path = recipe_file(recipe_values, tmp_path)
    overrides = ["method.head.hidden_size=48", "evaluation.nodes=[8, 16]", "features.source=cache", "data.eval=null"]
    recipe = read_recipe(path, overrides)
    assert recipe.method.head == {"hidden_size": 48}
    assert recipe.evaluation.nodes == [8, 16]
    assert recipe.features.source == "cache"
    assert recipe.data.eval is None


@pytest.mark.parametrize(
    ("place", "key", "suggestion"),
    [
        ((), "traning", "training"),
        (("data",), "max_lenght", "max_length"),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(recipe_values, place, key, suggestion):
    section = recipe_values
    for name in place:
        section = section.setdefault(name, {})
    section[key] = {}
    with pytest.raises(RecipeError, match=f"unknown key '{key}'.*Did you mean '{suggestion}'"):
        recipe_from(recipe_values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": {"dtype": "float8"}}, "target.dtype: input should be 'auto'"),
        ({"evaluation": {"num_prompts": "many"}}, "evaluation.num_prompts: input should be a valid integer"),
        (
            {"method": {"name": "eagle4"}},
            "unknown training method 'eagle4'.*mean 'eagle3'.*Installed: dflash, dspark, eagle1, eagle3",
        ),
    ],
)
def test_wrong_types_are_refused(recipe_values, change, message):
    for section, values in change.items():
        recipe_values[section] |= values
    with pytest.raises(RecipeError, match=message):
        recipe_from(recipe_values)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1"])
def test_read_recipe_refuses_other_files(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"is not (YAML|a recipe)"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: &t\n  x: *t\n", "Circular reference"),
        ("a: " + "[" * 3000 + "]" * 3000, "is not YAML: maximum recursion depth exceeded"),
        (
            "training: {learning_rate: .nan}",
            "recipe cannot be used: Out of range float.* It may hold .* finite numbers",
        ),
        ("training: {run_name: 2020-01-01}", "type date .* It may hold .* texts \\(in quotes\\)"),
        ("training: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("5: 6", "unknown key '5' in the recipe"),
        ("target: {path: " + "x" * (1 << 20) + "}", "more than 1 MB"),
    ],
    ids=range(7),
)
def test_read_recipe_refuses_yaml_that_is_no_recipe(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_recipe(path)


@pytest.mark.parametrize("override", ["training", "output.folder.x=3", "training.x={"])
def test_read_recipe_refuses_broken_overrides(recipe_values, tmp_path, override):
    with pytest.raises(RecipeError, match="--set"):
        read_recipe(recipe_file(recipe_values, tmp_path), [override])


def test_a_recipe_survives_being_written(recipe_values, tmp_path):
    recipe = recipe_from(recipe_values)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert read_recipe(tmp_path / "again.yaml").to_yaml() == recipe.to_yaml()


class TestTrainingSection:
    def test_training_section_suggests_a_known_argument(self, recipe_values):
        recipe_values["training"]["leraning_rate"] = 1e-3
        with pytest.raises(RecipeError, match="Did you mean 'learning_rate'"):
            training_arguments(recipe_from(recipe_values))

    def test_training_section_refuses_arguments_of_other_sections(self, recipe_values):
        recipe_values["training"]["output_dir"] = "x"
        with pytest.raises(RecipeError, match=r"training\.output_dir is not set in this section but by output\.folder"):
            training_arguments(recipe_from(recipe_values))

    def test_training_section_reports_what_transformers_refuses(self, recipe_values):
        recipe_values["training"]["lr_scheduler_type"] = "zigzag"
        with pytest.raises(RecipeError, match="the section training cannot be used"):
            training_arguments(recipe_from(recipe_values))

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("max_steps", "190:20:30", "max_steps: input should be a valid integer"),
            ("learning_rate", [1], "learning_rate: input should be a valid number"),
        ],
    )
    def test_training_section_refuses_values_of_other_types(self, recipe_values, tmp_path, name, value, message):
        recipe_values["training"][name] = value
        with pytest.raises(RecipeError, match=message):
            training_arguments(read_recipe(recipe_file(recipe_values, tmp_path)))

    def test_defaults_and_best_checkpoint(self, recipe_values):
        args = training_arguments(recipe_from(recipe_values))
        assert (args.adam_beta2, args.max_grad_norm, args.remove_unused_columns) == (0.95, 0.5, False)
        assert args.metric_for_best_model == "eval_mean_acceptance_length"
        assert args.greater_is_better is True
        assert args.load_best_model_at_end
        assert args.save_steps == args.eval_steps == 2

    def test_without_prompts_the_loss_decides(self, recipe_values):
        recipe_values["evaluation"]["num_prompts"] = 0
        args = training_arguments(recipe_from(recipe_values))
        assert args.metric_for_best_model == "eval_loss"
        assert args.greater_is_better is False

    def test_without_evaluation_data_nothing_is_evaluated(self, recipe_values):
        del recipe_values["data"]["eval"]
        args = training_arguments(recipe_from(recipe_values))
        assert args.eval_strategy == "no"
        assert not args.load_best_model_at_end


class TestMethodSection:
    @pytest.mark.parametrize(
        ("method", "message"),
        [
            ({"name": "eagle3", "head": {"num_layer": 8}}, "method.head.*Did you mean 'num_layers'"),
            ({"name": "medusa", "options": {"steps": 8}}, "unknown key 'steps' in method.options"),
            ({"name": "eagle3", "options": {"steps": "few"}}, "method.options.*steps: input should be a valid integer"),
            ({"name": "eagle1", "options": {"steps": 0}}, "method.options.*steps must be at least 1, got 0"),
            ({"name": "eagle3", "head": {"draft_vocab_size": 0}}, "draft_vocab_size must be from 1"),
            ({"name": "eagle3", "head": {"draft_vocab_size": 5}}, "chosen by the training data, and there are none"),
            ({"name": "eagle3", "head": {"hidden_size": 8}, "start_from": "x"}, "start_from brings a head"),
        ],
    )
    def test_method_section_refuses_options_of_other_methods(self, recipe_values, tiny_model, method, message):
        recipe_values["method"] = method
        with pytest.raises(RecipeError, match=message):
            build_method(recipe_from(recipe_values).method, tiny_model(), data=None)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_can_be_used(path, tiny_model):
    recipe = read_recipe(path)
    args = training_arguments(read_recipe(path, ["training.bf16=false", "training.use_cpu=true"]))
    assert args.output_dir == recipe.output.folder
    # A head of the recipe's switches, for a target that is there.
    small = copy.deepcopy(recipe.method.head)
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "draft_vocab_size", "feature_layers"):
        small.pop(name, None) if recipe.method.name != "medusa" else None
    values = recipe.to_dict()
    values["method"] |= {"head": small}
    section = recipe_from(values).method
    assert build_method(section, tiny_model(), data=None).name == recipe.method.name
