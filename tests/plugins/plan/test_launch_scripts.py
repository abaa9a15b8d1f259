"""Launch scripts are read as a shell would run them, without running anything; what cannot be known stays unknown."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.cli import __main__ as cli
from countoff.plan.fields import Unknown
from countoff.plan.readers import ConfigError, read_job
from countoff.plan.scripts.commands import Command, read_commands
from countoff.plan.scripts.launches import read_launches
from countoff.plan.scripts.unknown import is_unknown, unknown_parts

# Scripts whose commands are known, each with at least one `torchrun`.
KNOWN = [
    "torchrun a.py --x 1",
    "# a comment\ntorchrun a.py # another\n",
    "torchrun a#b --x='#c' \"#d\"",
    "torchrun a.py \\\n  --x 1 \\\n  --y 2\n",
    "N=4\nM=8; torchrun $N ${M} $((N * M)) $((N*M/3)) $(($N+${M})) $((7 / 2)) $(( (1+2)*3 )) $((M - N))x",
    "A='a b'\ntorchrun $A \"$A\" '$A' x$A\"y\"",
    'A="it\'s"; B=\'say "hi"\'; torchrun "$A" "$B" \\$A "\\$A" a\\ b',
    'A=(--x 1 "two words" # comment\n --y\n)\nA+=(--z 3)\ntorchrun ${A[@]} "${A[@]}" ${A[1]} "${A[*]}" $A',
    'A=1; torchrun ${A:-2} ${B:-2} ${B-3} ${A:+x} ${B:+y} "${C:-two words}" ${D:-${A}} ${E:=5} $E ${F:-"q"}',
    'OPTS=" --x 1 \\\n  --y 2"\ntorchrun ${OPTS} --z',
    "A=x; A+=y; torchrun $A \"\" ''",
    "export A=1 B=2; declare -r C=3; torchrun $A $B $C",
    'S=b\nif [ "$S" = a ]; then X=1; elif [[ $S == b ]]; then X=2; else X=3; fi\ntorchrun $X',
    "N=3; if [ $N -gt 2 ]; then torchrun many; else torchrun few; fi",
    "case big in small) X=1;; b*|huge) X=2 ;; *) X=3;; esac; torchrun $X",
    '[ -z "" ] && X=1; [ -n "" ] && X=2; [ a = b ] || Y=3; torchrun $X $Y',
    "true && torchrun a; false && torchrun b; false || torchrun c; true || torchrun d",
    "run() { torchrun --x $1 $2; }\nrun 5 six",
    'CMD="torchrun --x 1"; $CMD --y; eval "$CMD --z"',
    "cat <<EOF > /dev/null\ntorchrun --not this 'one\nEOF\ntorchrun --this one",
    "{ torchrun a; } ; ( torchrun b )",
    "A=1 B=2 torchrun z; torchrun x 2>&1 < /dev/null; torchrun y 2> /dev/null",
    "if false; then exit 1; fi; torchrun a; exit 0; torchrun b",
    'ARGS=(); if [ 1 = 1 ]; then ARGS+=("--x y"); fi; torchrun ${ARGS[@]} "${ARGS[@]}"',
    'torchrun a "$@" $@ | cat',
    # What tree-sitter's grammar of bash reads otherwise than bash, unless it is helped.
    "A=x; B=y; P=$A/v_$B/; torchrun $A/$B.c --dir=$A-$B \"${P}$B\" \"  $A  $B \" '$A' '${A}'",
    "run() { torchrun $1_a/$2.b; }; run x y; true",
    "A='a b'; B=c; torchrun ${A:+--x \"$A\" $B} ${Z:-u-v} ${Z:-$B/w.d}",
    "torchrun --x 1 2> /dev/null --y 2 < /dev/null --z\ntorchrun a \\\n",
    "A=1; f() { A=$((A * 2)); }; f; ( A=7 ); A=8 | true; torchrun $A $'x' \"\"",
]


def of_bash(script: str) -> list[list[str]]:
    """The arguments with which bash calls torchrun."""
    recorder = "torchrun() { printf '%s\\1' \"$@\"; printf '\\2'; }\nunset B C D E F X\n"
    done = subprocess.run(["bash", "-c", recorder + script], capture_output=True, text=True, timeout=20, check=False)
    return [call.split("\1")[:-1] for call in done.stdout.split("\2")[:-1]]


@pytest.mark.parametrize("script", KNOWN)
def test_a_command_has_the_words_that_bash_gives_it(script: str) -> None:
    read = [list(command.words[1:]) for command in read_commands(script) if command.words[0] == "torchrun"]
    assert read == of_bash(script)
    assert read


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("torchrun $1 ${2}", ["$1", "$2"]),
        ("torchrun x$(nproc --all)y `hostname`", ["$(nproc --all)", "`hostname`"]),
        ("torchrun $((N*2)) ${N%x} ${#N}", ["$((N*2))", "${N%x}", "${#N}"]),
        ("if [ -f x ]; then N=1; else N=2; fi; torchrun $N", ["$N"]),
        ("N=1; if [ -f x ]; then N=2; fi; torchrun $N", ["$N"]),
        ("N=1; for N in 1 2; do N=3; done; torchrun $N", ["$N"]),
        ("N=1; [ -f x ] && N=2; torchrun $N", ["$N"]),
        ("A=(a); if [ -f x ]; then A+=(b); fi; torchrun ${A[@]}", ["", "${A[@]}"]),
        ("if [ -f x ]; then N=1; else exit 1; fi; torchrun $N", [""]),
        (
            "torchrun $((1/0)) $((9**9)) $((99999999999 * 99999999999)) $((7 % 4)) $((3 - 5)) $((010))",
            ["$((1/0))", "$((9**9))", "$((99999999999 * 99999999999))", "$((7 % 4))", "$((3 - 5))", "$((010))"],
        ),
        ("N=1; for N in 1 2; do torchrun $N; done", ["$N"]),
        ("A=(a b); A[1]=c; torchrun ${A[1]} ${A[0]}", ["${A[1]}", "$A"]),
        ("N=1; read N; f() { :; }; f 5; torchrun $N $1", ["$N", "$1"]),
        ("N=1; if command -v x; then N=2; fi; torchrun $N", ["$N"]),
        ("K=ab; torchrun ${K:$N+1} ${K^^} x", ["${K:$N+1}", "${K^^}", ""]),
        ("DATA=<where it is>\nOUT=<a b>/c\nN=1\ntorchrun $DATA $OUT $N", ["<where it is>", "<a b>", ""]),
        ('N=a; eval "A=\\$$M"; eval "B=$Q; C=1"; torchrun "$B" $C', ["$Q", ""]),
        ('torchrun $1$2 "${HOME}/x $1"', ["$1, $2", "$HOME, $1"]),
    ],
)
def test_what_only_the_machine_knows_is_unknown(script: str, words: list[str]) -> None:
    (command,) = [one for one in read_commands(script) if one.words[0] == "torchrun"]
    assert [unknown_parts(word) for word in command.words[1:]] == words


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo\ntorchrun 'a", "line 2: ' is missing"),
        ('torchrun "a\n', 'line 1: " is missing'),
        ("A=(1 2", "line 1: ) is missing"),
        ("torchrun ${A", "line 1: } is missing"),
        ("torchrun $(A", "line 1: ) is missing"),
        ("if true; then torchrun a", "line 1: fi is missing"),
        ("if true; torchrun a", "line 1: fi is missing"),
        ("case a in b) torchrun", "line 1: esac is missing"),
        ("while true; torchrun a", "line 1: done is missing"),
        ("torchrun a\ndone", "line 2: done is not expected"),
        ("torchrun a\n)", "line 2: ) is not expected"),
        ('X="a\nfi"\n\neval "$X"', "line 5: fi is not expected"),
        ("f() { f; }; f", "f calls itself"),
        ("f() { g; g; }; g() { h; h; }; h() { " + "true;" * 6000 + "}; f", "it runs more than 10,000 commands"),
        ("A=xxxxxxxxxx;" + "A=$A$A;" * 64, "its values grow beyond 1,000,000 characters"),
        ("A=(x x x x);" + "A+=(${A[@]});" * 64, "its values grow beyond 1,000,000 characters"),
        ("A=" + "${B:-" * 3000 + "}" * 3000, "it is nested too deeply"),
        ("( " * 20_000, "line 1: ) is missing"),
        ("( " * 20_000 + "a" + ")" * 20_000, "it is nested too deeply"),
        ("torchrun $((" + "(" * 20_000 + "1" + ")" * 20_000 + "))", "it is nested too deeply"),
        ("x" * 200_001, "it has more than 200,000 characters"),
        ("a|" * 1_001, "it has more than 1,000 pipes"),
        ("torchrun \0", "it is not text"),
    ],
    ids=lambda value: value[:30],
)
def test_a_script_that_is_not_well_formed_is_refused_in_one_line(script: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_commands(script)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


DEEP = """
import time
from countoff.plan.scripts.syntax import parsed, source

def deep(calls):
    return deep(calls - 1) if calls else source(node)

node = parsed("torchrun a", line=1, until=time.process_time() + 60)
for calls in range(980, 1000):
    try:
        deep(calls)
    except RecursionError:
        pass
print(deep(10))
"""


def test_a_text_that_is_read_where_python_calls_no_deeper_does_not_crash() -> None:
    """tree-sitter does not check what a callback returns, and it returns nothing there."""
    ran = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "torchrun a\n"), ran.stderr


SHELL = st.text(st.sampled_from("ab1 \n\t'\"\\$(){}[]#=+&|;<>`-*:@!~%")) | st.lists(
    st.sampled_from(
        [*"ab=;\n(){}$\"'", "if", "then", "fi", "case", "in", "esac", ";;", "do", "done", "for", " ", "$((", "))"]
    )
).map(" ".join)


@settings(max_examples=1000, deadline=None)
@given(SHELL)
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    commands: list[Command] = []
    error = ""
    try:
        commands = read_commands(text)
    except ConfigError as refused:
        error = str(refused)
    assert "\n" not in error
    assert all(command.words for command in commands)


@pytest.mark.parametrize(
    ("script", "program", "ranks"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --lr 1", "pretrain_gpt.py", 32),
        ("torchrun --nproc-per-node=8 --nnodes=1:1 a/pretrain_gpt.py --lr 1", "pretrain_gpt.py", 8),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py --lr 1", "pretrain_gpt.py", None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4 pretrain_gpt.py --lr 1", "pretrain_gpt.py", None),
        ("python -m torch.distributed.launch --nproc_per_node=4 pretrain_gpt.py --lr 1", "pretrain_gpt.py", 4),
        ("accelerate launch --num_processes 16 run_clm.py --lr 1", "run_clm.py", 16),
        ("deepspeed --num_gpus 8 --num_nodes 2 run_clm.py --lr 1", "run_clm.py", 16),
        ("srun -N 2 bash -c 'torchrun --nproc_per_node 8 pretrain_gpt.py --lr 1'", "pretrain_gpt.py", 8),
        ("OMP_NUM_THREADS=1 nohup python -u pretrain_gpt.py --lr 1 &", "pretrain_gpt.py", None),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=8 --lr 1", "verl.trainer.main_ppo", None),
        ("$PYTHON pretrain_gpt.py --lr 1", "pretrain_gpt.py", None),
        ("--lr 1", "", None),
    ],
)
def test_the_program_and_its_ranks_are_found(script: str, program: str, ranks: int | None) -> None:
    (launch,) = read_launches(f"echo run.py\ncp a.py b.py\n{script}")
    assert (launch.program, launch.size.ranks if launch.size else None) == (program, ranks)
    assert launch.flags["--lr"] == 1


def test_arguments_have_the_types_of_their_values() -> None:
    (launch,) = read_launches(
        "python a.py --a 1 --b 1e-4 --c x --d --e 1 2 3 --f=-1 --g -2 --h $1 --i 5 $2 --a 7 +k.l=True k.m='x'"
    )
    assert launch.flags == {
        **{
            "--a": 7,
            "--b": 1e-4,
            "--c": "x",
            "--d": True,
            "--e": [1, 2, 3],
            "--f": -1,
            "--g": -2,
            "--h": Unknown("$1"),
        },
        "--i": 5,
    }
    assert launch.fields == {"k": {"l": True, "m": "x"}}
    assert not any(is_unknown(name) for name in launch.flags)


def test_one_program_started_in_two_ways_is_one_launch_on_an_unknown_number_of_ranks() -> None:
    (launch,) = read_launches("torchrun --nproc_per_node 8 a.py --x 1 --y\ntorchrun --nproc_per_node 4 a.py --y --x 1")
    assert (launch.size, launch.line) == (None, 1)


def test_a_program_whose_name_is_not_known_is_shown_as_written() -> None:
    assert [launch.program for launch in read_launches("python tasks/$TASK.py --x 1")] == ["$TASK.py"]


def test_a_field_in_more_sections_than_any_is_left_out() -> None:
    (launch,) = read_launches(f"python a.py {'a.' * 50_000}b=1 a.b=2")
    assert launch.fields == {"a": {"b": 2}}


MEGATRON = "--micro-batch-size 2 --train-iters 100 --lr 1e-4 --seq-length 1024"


def test_a_file_of_arguments_is_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "gpt.args").write_text(MEGATRON.replace(" --", "\n--"))
    job = read_job(str(tmp_path / "gpt.args"))
    assert (job.framework, job.batch_size, job.steps, job.world_size) == ("megatron", 2, 100, None)


def check(arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "-", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_command_line_is_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check([], f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} --global-batch-size 64", monkeypatch) == 0
    assert check([], f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} --global-batch-size 60", monkeypatch) == 1
    assert (
        "--global-batch-size 60 is no multiple of --micro-batch-size 2 × 8 data ranks = 16 samples"
        in capsys.readouterr().out
    )


def test_without_what_parses_it_a_script_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    assert check([], f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON}", monkeypatch) == 2
    needs = "reading a launch script needs tree-sitter: pip install 'countoff[plan]'"
    assert capsys.readouterr() == ("", f"countoff: standard input: {needs}\n")


def test_an_unknown_size_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--tensor-model-parallel-size $TP --global-batch-size 16"
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} {sizes}"
    assert check([], script, monkeypatch) == 2
    assert (
        capsys.readouterr().err
        == "countoff: --tensor-model-parallel-size is $TP, which is known only when the job runs: give --tp\n"
    )
    assert check(["--tp", "2"], script, monkeypatch) == 0
    assert check(["--tp", "2"], script.replace("16", "$GBS"), monkeypatch) == 2
    assert (
        "--global-batch-size is $GBS, which is known only when the job runs: give --global" in capsys.readouterr().err
    )


def test_an_unknown_number_is_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON} --lr-warmup-iters $WARMUP"
    assert check([], script, monkeypatch) == 0
    assert "note    unknown-value: --lr-warmup-iters is $WARMUP, which is known only when" in capsys.readouterr().out


NO_TRAINING = (
    "it starts no training that countoff knows by its arguments (megatron | transformers | nemo | verl); with its "
    "numbers as flags: countoff plan"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python eval.py --x 1", "it starts no training that countoff knows by its arguments (megatron | "),
        ("", f"{NO_TRAINING} --world-size N --batch-size N"),
        (
            "python a.py --x 1\ntorchrun --nproc_per_node 4 --nnodes 2 train.py --batch-size 32 --epochs 3 --lr 1",
            f"{NO_TRAINING} --world-size 8 --batch-size 32 --epochs 3 --dataset-size N",
        ),
        (
            "accelerate launch --num_processes 4 train.py batch_size=$BATCH max_steps=500",
            f"{NO_TRAINING} --world-size 4 --batch-size N --steps 500",
        ),
        (
            f"torchrun pretrain_gpt.py {MEGATRON}\ntorchrun pretrain_bert.py {MEGATRON} --bf16",
            "it starts more than one training: pretrain_gpt.py in line 1, pretrain_bert.py in line 2; give one of the",
        ),
        (
            "python a.py --micro-batch-size 1 exp_manager=x",
            "it has arguments of megatron and nemo: give --framework megatron | nemo",
        ),
        (
            "python a.py --micro-batch-size 1.5 --train-iters 3",
            "--micro-batch-size must be a whole number of at least 1, got",
        ),
        (
            "python a.py --micro-batch-size -1 --train-iters 3",
            "--micro-batch-size must be a whole number of at least 1, got",
        ),
        ("python a.py --micro-batch-size 1 --train-iters 3 --lr nan", "--lr must be a finite number, got nan"),
        (
            "python a.py --train-iters 3 --lr-decay-style line",
            "--lr-decay-style must be one of constant, linear, cosine, ",
        ),
        (f"python a.py {MEGATRON} --rampup-batch-size 8 8", "--rampup-batch-size must be three numbers"),
        (
            f"python a.py {MEGATRON} --step-batch-size-schedule 5K:8",
            "--step-batch-size-schedule must begin with an entry at 0",
        ),
        (f"python a.py {MEGATRON} --lr-warmup-fraction 2", "--lr-warmup-fraction must be a number from 0 to 1, got 2"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert check(["--world-size", "4"], text, monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"countoff: standard input: {message}")
    assert error.count("\n") == 1


def test_a_script_of_the_trainer_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags may have dashes or underscores."""
    script = (
        "torchrun --nproc_per_node 4 run_clm.py --per_device_train_batch_size 8 --gradient-accumulation-steps 2 "
        "--max_steps 1000 --learning_rate 5e-5 --bf16 --output_dir $1"
    )
    assert check([], script, monkeypatch) == 0
    assert check([], f"{script} --warmup_steps 2000", monkeypatch) == 1
    assert "warmup_steps is 2,000 and max_steps is 1,000: the learning rate only rises" in capsys.readouterr().out
    assert check([], script.replace("batch_size 8", "batch_size $BATCH"), monkeypatch) == 2
    error = "per_device_train_batch_size is $BATCH, which is known only when the job runs: give --batch-size"
    assert capsys.readouterr().err == f"countoff: {error}\n"
    assert check([], f"{script} --warmup_steps $WARMUP", monkeypatch) == 0
    assert "note    unknown-value: warmup_steps is $WARMUP, which is known only" in capsys.readouterr().out
