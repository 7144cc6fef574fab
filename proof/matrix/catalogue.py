"""The programs of the matrix, each with the published script it is built as.

Rules of this file:
- A mask or a volatile key is a time that is measured or a name made of one; a number that training made is never masked.
- `every` is small enough that each program is saved often.
"""

from __future__ import annotations

from proof.matrix.case import PROGRAMS, Case

_SECONDS = r"\d+\.\d+(e-?\d+)? ?(ms|s)\b"
#: PEFT writes a set of names as a list: its order is that of this process's hashes.
_ORDER_OF_A_SET = (r"^target_modules$",)
_TRAINER = (r"runtime", r"per_second", *_ORDER_OF_A_SET)
_TRAINER_LINES = (r"'\w*(runtime|per_second)': '[^']*'",)
_TRAINER_SKIP = ("*/training_args.bin", "cache/*", "*/README.md")
_EPOCH = r"^epoch (\d+) \[(\d+)/"
_STEP = r"^step (\d+)"


def _case(name: str, model_of: str, progress: str, **given: object) -> Case:
    lone = PROGRAMS / f"{name}.py"
    source, script = (lone, lone.name) if lone.exists() else (PROGRAMS / name, "main.py")
    return Case(name=name, model_of=model_of, source=source, script=script, progress=progress, **given)  # type: ignore[arg-type]


def cases() -> list[Case]:
    return [*of_torch(), *of_karpathy(), *reinforcement(), *of_hugging_face(), *of_other_libraries()]


def of_torch() -> list[Case]:
    return [
        _case("mnist", "pytorch/examples mnist", _EPOCH),
        _case("mnist_rnn", "pytorch/examples mnist_rnn", _EPOCH),
        _case("vae", "pytorch/examples vae", _EPOCH),
        _case("dcgan", "pytorch/examples dcgan", r"^\[(\d+)/\d+\]\[(\d+)/"),
        _case(
            "word_language_model",
            "pytorch/examples word_language_model",
            r"^epoch (\d+) batch (\d+)",
            masks=(r"each +[\d.]+", r" in +[\d.]+s"),
            every="20",
        ),
        _case(
            "time_sequence_prediction",
            "pytorch/examples time_sequence_prediction",
            r"^step (\d+)",
            every="2",
        ),
        _case("super_resolution", "pytorch/examples super_resolution", r"^epoch \[(\d+)\] batch (\d+)"),
        _case("siamese_network", "pytorch/examples siamese_network", _EPOCH, every="10"),
        _case("gcn", "pytorch/examples gcn", r"^epoch (\d+)", masks=(r"\([\d.]+s\)",)),
        _case("gat", "pytorch/examples gat", r"^epoch (\d+)", masks=(r"\([\d.]+s\)",)),
        _case("regression", "pytorch/examples regression", r"^batch (\d+)"),
        _case(
            "imagenet",
            "pytorch/examples imagenet",
            r"^epoch \[(\d+)\]\[(\d+)/",
            masks=(r"Time +[\d.]+ \( *[\d.]+\)",),
        ),
        _case(
            "transfer_learning",
            "PyTorch's transfer learning tutorial",
            r"loss of epoch (\d+)",
            masks=(r"in [\d.]+ s",),
            every="20",
        ),
        _case("amp_recipe", "PyTorch's AMP recipe", r"epoch (\d+) batch (\d+)"),
        _case(
            "timm_train",
            "timm's train.py",
            r"^epoch (\d+) \[ *(\d+)/",
            masks=(r"Time: [\d.]+s",),
            loop_of="script",
        ),
        _case(
            "yolo_trainer",
            "ultralytics' trainer",
            r"epoch (\d+) batch (\d+)",
            volatile=(r"^time$", r"date"),
            loop_of="module",
        ),
    ]


def of_karpathy() -> list[Case]:
    return [
        _case("nanogpt", "nanoGPT train.py", r"^iter (\d+):", masks=(r"time [\d.]+ms, mfu [-\d.]+%",)),
        _case("makemore", "makemore", r"^step (\d+) \|", masks=(r"in [\d.]+ms",), every="10"),
        _case(
            "mingpt",
            "minGPT chargpt",
            r"iter (\d+):",
            masks=(r"iter_dt [\d.]+ms",),
            loop_of="module",
            every="10",
        ),
    ]


def reinforcement() -> list[Case]:
    sps = {"volatile": (r"SPS",)}
    return [
        _case("reinforce", "pytorch/examples reinforce", r"^episode (\d+)"),
        _case("actor_critic", "pytorch/examples actor_critic", r"^episode (\d+)"),
        _case("dqn_tutorial", "PyTorch's DQN tutorial", r"^episode (\d+)", every="50"),
        _case("cleanrl_dqn", "CleanRL dqn", r"^global_step=(\d+)", every="50", **sps),
        _case("cleanrl_ppo", "CleanRL ppo", r"^iteration=(\d+)", every="10", **sps),
        _case("cleanrl_ddpg", "CleanRL ddpg_continuous_action", r"^global_step=(\d+)", every="20", **sps),
    ]


def of_hugging_face() -> list[Case]:
    trainer = {"masks": _TRAINER_LINES, "volatile": _TRAINER, "skip": _TRAINER_SKIP, "loop_of": "library"}
    return [
        _case("accelerate_cv", "accelerate cv_example", r"^epoch (\d+) step (\d+)"),
        _case("hf_causal_lm", "transformers Trainer, causal", _STEP, **trainer),
        _case("hf_masked_lm", "transformers Trainer, masked", _STEP, **trainer),
        _case("run_clm", "transformers run_clm.py", _STEP, **trainer),
        _case(
            "peft_lora",
            "PEFT sequence classification",
            r"^epoch (\d+) step (\d+)",
            skip=("*/README.md",),
            volatile=_ORDER_OF_A_SET,
        ),
        _case("trl_sft", "TRL SFTTrainer", _STEP, **trainer),
        _case("sentence_embeddings", "sentence-transformers training", _STEP, **trainer),
        _case(
            "diffusers_unconditional",
            "diffusers train_unconditional.py",
            r"^epoch (\d+) step (\d+)",
            every="4",
        ),
    ]


def of_other_libraries() -> list[Case]:
    library = {"loop_of": "library"}
    return [
        _case("lightning_fit", "Lightning Trainer.fit", r"^epoch (\d+) batch (\d+)", **library),
        _case("keras_fit", "Keras 3 on torch, Model.fit", r"^epoch (\d+) batch (\d+)", **library),
        _case("ignite_mnist", "pytorch-ignite mnist", r"Epoch\[(\d+)\] Iteration\[(\d+)\]", **library),
        _case(
            "skorch_net",
            "skorch NeuralNetClassifier",
            r"^batch (\d+)",
            masks=(r"\d\.\d+\s*$", r"-+"),
            volatile=(r"^dur$",),
            **library,
        ),
        _case("torchmetrics_loop", "torchmetrics quick start", r"^epoch (\d+) batch (\d+)"),
        _case("sklearn_partial_fit", "scikit-learn out-of-core", r"^batch (\d+)", masks=(rf"in {_SECONDS}",)),
        _case("xgboost_train", "xgboost.train", r"^round (\d+)", **library),
        _case("lightgbm_train", "lightgbm.train", r"^round (\d+)", **library),
        _case("jax_optax", "JAX with optax", _STEP),
        _case("flax_nnx", "flax nnx mnist", _STEP),
    ]
