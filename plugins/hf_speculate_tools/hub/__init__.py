"""Model cards and uploads of heads, and privacy.

`huggingface_hub` writes repositories. A card is written from measured facts. An upload is a list of regular files that
the head's layout names. One that holds a secret is refused.
"""

from .card import rename_card as rename_card
from .card import write_card as write_card
from .card import write_custom_generate as write_custom_generate
from .public import public_provenance as public_provenance
from .public import public_recipe as public_recipe
from .publishing import CURVES_FILE as CURVES_FILE
from .publishing import LOCAL_RECIPE_FILE as LOCAL_RECIPE_FILE
from .publishing import RECIPE_FILE as RECIPE_FILE
from .publishing import card_facts as card_facts
from .publishing import copy_origins as copy_origins
from .publishing import push_folder as push_folder
from .publishing import recorded_card as recorded_card
from .uploads import check_upload as check_upload
