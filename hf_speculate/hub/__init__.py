"""Heads on disk and on the Hub: download and upload, model cards, the origin of a head, and privacy.

`huggingface_hub` reads and writes repositories. A card is written from measured facts. An upload is a list of regular
files that the head's layout names, without secrets and without paths of this machine.
"""

from .card import ADAPTER_FOLDER as ADAPTER_FOLDER
from .card import CUSTOM_GENERATE_FOLDER as CUSTOM_GENERATE_FOLDER
from .card import Metric as Metric
from .card import rename_card as rename_card
from .card import write_card as write_card
from .card import write_custom_generate as write_custom_generate
from .provenance import PROVENANCE_FILE as PROVENANCE_FILE
from .provenance import public_provenance as public_provenance
from .provenance import public_recipe as public_recipe
from .provenance import publishable as publishable
from .provenance import read_provenance as read_provenance
from .publishing import CURVES_FILE as CURVES_FILE
from .publishing import LOCAL_RECIPE_FILE as LOCAL_RECIPE_FILE
from .publishing import RECIPE_FILE as RECIPE_FILE
from .publishing import card_facts as card_facts
from .publishing import clean_folder as clean_folder
from .publishing import copy_origins as copy_origins
from .publishing import published_files as published_files
from .publishing import push_folder as push_folder
from .publishing import recorded_card as recorded_card
from .repositories import check_upload as check_upload
from .repositories import drafter_class_for as drafter_class_for
from .repositories import local_folder as local_folder
from .repositories import make_repository as make_repository
from .repositories import upload_head as upload_head
from .targets import check_head_vocabulary as check_head_vocabulary
from .targets import check_origin as check_origin
from .targets import check_stated_name as check_stated_name
from .targets import describe_identity as describe_identity
from .targets import head_record as head_record
