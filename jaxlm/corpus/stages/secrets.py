"""Finds keys and tokens in a text by the formats that their issuers publish, never by entropy.

Most regexes are those of detect-secrets (github.com/Yelp/detect-secrets), without its plugins for entropy and for names of
variables; the others are newer formats and whole key blocks. A regex runs only on a text that holds one of its literals,
which is rare; if the literal is too common, another regex takes its place.
"""

import collections.abc
import re

from detect_secrets.plugins import (
    aws,
    azure_storage_key,
    basic_auth,
    discord,
    github_token,
    gitlab_token,
    mailchimp,
    npm,
    openai,
    pypi_token,
    sendgrid,
    slack,
    square_oauth,
    stripe,
    telegram_token,
    twilio,
)

__all__ = ["find"]

# Literals or regexes of which every match holds one, the regexes, and the group that is the secret.
_FORMATS = (
    (("AKIA", "ASIA", "ABIA", "ACCA", "A3T"), aws.AWSKeyDetector.denylist[:1], 0),
    (("aws", "AWS", "Aws"), aws.AWSKeyDetector.denylist[1:], 1),
    (("AccountKey=",), azure_storage_key.AzureStorageKeyDetector.denylist, 0),
    (("://",), basic_auth.BasicAuthDetector.denylist, 1),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), github_token.GitHubTokenDetector.denylist, 0),
    (("glpat-", "gldt-", "glft-", "glsoat-", "glrt-"), gitlab_token.GitLabTokenDetector.denylist[:1], 0),
    (("GR1348941", "glcbt-", "glimt-", "glptt-", "glagent-", "gloas-"), gitlab_token.GitLabTokenDetector.denylist[1:], 0),
    ((re.compile(r"-us(?<=[0-9a-z]{8}-us)\d"),), mailchimp.MailchimpDetector.denylist, 0),
    (("_authToken",), npm.NpmDetector.denylist, 1),
    (("T3BlbkFJ",), openai.OpenAIDetector.denylist, 0),
    (("pypi-",), pypi_token.PypiTokenDetector.denylist, 0),
    (("SG.",), sendgrid.SendGridDetector.denylist, 0),
    (("xox", "hooks.slack.com"), slack.SlackDetector.denylist, 0),
    (("sq0csp-",), square_oauth.SquareOAuthDetector.denylist, 0),
    (("k_live_",), stripe.StripeDetector.denylist, 0),
    (("AC", "SK"), twilio.TwilioKeyDetector.denylist, 0),
    ((re.compile(r":(?<=\d{8}:)[\w-]{35}"),), telegram_token.TelegramBotTokenDetector.denylist, 0),
    (("M", "N", "O"), discord.DiscordBotTokenDetector.denylist, 0),
    # JWT with its signature. Only where a run of such characters begins, and only if the payload follows: linear time.
    (("eyJ",), (re.compile(r"(?a)(?<![\w-])(?=[\w-]++\.eyJ[\w-]{4})(?:[\w-]*?[_-])??"
        r"(eyJ[\w-]{8,}+\.eyJ[\w-]{4,}+(?:\.[\w-]*+)?)"),), 1),
    # As their issuers publish them, and not in detect-secrets 1.5.
    (("AIza",), (re.compile(r"AIza[\w-]{35}"),), 0),
    (("GOCSPX-",), (re.compile(r"GOCSPX-[\w-]{28}"),), 0),
    (("ya29.",), (re.compile(r"ya29\.[\w-]{30,}"),), 0),
    (("github_pat_",), (re.compile(r"github_pat_\w{50,}"),), 0),
    (("npm_",), (re.compile(r"npm_[A-Za-z0-9]{36}"),), 0),
    (("hf_",), (re.compile(r"hf_[A-Za-z]{34}"),), 0),
    (("sk-",), (re.compile(r"sk-(?:[a-z]+\d*-)*[A-Za-z0-9][\w-]{31,}"),), 0),  # OpenAI, Anthropic, OpenRouter
    (("k_test_",), (re.compile(r"[rs]k_test_[0-9A-Za-z]{24,}"),), 0),
    (("whsec_",), (re.compile(r"whsec_[A-Za-z0-9+/=]{24,}"),), 0),
    (("xapp-",), (re.compile(r"xapp-\d-\w+-\d+-[a-f0-9]{32,}"),), 0),
    (("api/webhooks/",), (re.compile(r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]{60,}"),), 0),
    (("dop_v1_",), (re.compile(r"dop_v1_[a-f0-9]{64}"),), 0),
    (("shpat_", "shpca_", "shppa_", "shpss_"), (re.compile(r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"),), 0),
    (("AGE-SECRET-KEY-",), (re.compile(r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),), 0),
    (("ecret", "ECRET"), (re.compile(r"(?i)secret_?(?:access_?)?key[\"']?\s{0,3}[=:]\s{0,3}[\"']?([0-9a-z/+]{40})\b"),), 1),
    # The block goes with its body; a title alone, or "..." for a body, stays.
    (("PRIVATE KEY",), (re.compile(r"-----BEGIN ([A-Z0-9 ]*)PRIVATE KEY(?: BLOCK)?-----(?=[\s\S]{0,400}?[A-Za-z0-9+/=]{40})"
        r"(?:[^-]|-(?!----))+(?:-----END \1PRIVATE KEY(?: BLOCK)?-----)?"),), 0),
    (("PuTTY-User-Key-File-",), (re.compile(r"PuTTY-User-Key-File-\d:[\s\S]{0,4000}?Private-MAC: ?[0-9a-f]+"),), 0),
)  # fmt: skip
_MIN_DISTINCT = 8  # characters; "ghp_xxxxxxxx..." in a manual is no secret
_PLACEHOLDER = re.compile(r"[<{%$*]|(?i:pass(?:word|wd)?|secret|pw|pwd|x+)$")  # user:password@ in a manual


def find(text: str) -> collections.abc.Iterator[tuple[int, int]]:
    """Yields (start, end) of each secret; spans of different formats may overlap."""
    for literals, regexes, group in _FORMATS:
        if not any(literal in text if isinstance(literal, str) else literal.search(text) for literal in literals):
            continue
        for regex in regexes:
            for match in regex.finditer(text):
                start, end = match.span(group)
                if _is_secret(text, start, end, password=literals == ("://",)):
                    yield start, end


def _is_secret(text: str, start: int, end: int, password: bool) -> bool:
    """True if a match is no part of a longer word (such as a line of base64) and no placeholder."""
    secret = text[start:end]
    if password:
        return not _PLACEHOLDER.match(secret)
    around = text[start - 1 : start] + text[end : end + 1]
    if any(c.isascii() and c.isalnum() for c in around) or len(set(secret)) < _MIN_DISTINCT:
        return False
    return any(c.isdigit() for c in secret) or not secret.isupper()
