"""A cleaning rule that replaces mail addresses, IP addresses and phone numbers by placeholders."""

from pii.rule import PersonalData as PersonalData
