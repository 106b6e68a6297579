"""Public test tools: scripted drafters, a conformance check for drafters, and the check that text is lossless."""

from .conformance import DrafterReport as DrafterReport
from .conformance import check_drafter as check_drafter
from .lossless import LosslessReport as LosslessReport
from .lossless import Tie as Tie
from .lossless import check_lossless as check_lossless
from .scripted import EmptyDrafter as EmptyDrafter
from .scripted import RaisingDrafter as RaisingDrafter
from .scripted import RandomDrafter as RandomDrafter
from .scripted import ScriptedDrafter as ScriptedDrafter
from .scripted import unpadded as unpadded
