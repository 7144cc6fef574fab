"""What a bucket said when it failed, in our words, and what to do about it.

Rules of this file:
- The client library's own messages hold addresses and signatures: they are never passed on, not even as a
  cause.
"""

from __future__ import annotations

import errno
import re

from sublet.store.buckets.connection import VARIABLE_PREFIXES, variable_name

_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of this machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the account of this machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and its key or token",
}
#: By what the server said: the first that fits.
_REMEDIES = (
    (
        ("no such bucket", "NoSuchBucket"),
        "create it, or correct its name in SUBLET_STORE: sublet creates no bucket",
    ),
    (
        ("RequestTimeTooSkewed", "RequestExpired"),
        "set this machine's clock (chrony, systemd-timesyncd): the server refuses requests that are minutes "
        "off",
    ),
    (
        ("another region", "AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocation"),
        "say where it is: {prefix}_REGION for all buckets, or {own}_REGION for this one",
    ),
    (
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "InvalidToken",
            "ExpiredToken",
            "does not know the credentials",
            "401",
        ),
        "the key is not one the server knows: check {keys}; for this bucket alone {own}_ACCESS_KEY_ID and so "
        "on",
    ),
    (
        ("403", "AccessDenied", "do not allow it"),
        "the server knows the bucket and refuses this key: let it read, write, list and delete under the "
        "prefix, or check {keys}",
    ),
    (
        ("ALLOW_HTTP",),
        "set {prefix}_ALLOW_HTTP=true if the network between is yours, or use an https:// address",
    ),
    (
        ("no connection", "no answer", "connection broke", "answered 5", "SlowDown"),
        "nothing is lost, saves wait for it: check its address ({prefix}_ENDPOINT_URL or "
        "{own}_ENDPOINT_URL), the network and the server's own state",
    ),
)
_PERMANENT = (
    "PermissionDeniedError",
    "UnauthenticatedError",
    "NotSupportedError",
    "InvalidPathError",
    "UnknownConfigurationKeyError",
)
#: Answers of the 4xx family that the same request may not get again.
_PASSING = {"408", "409", "423", "425", "429"}


class BucketFailed(OSError):
    """A bucket that refused, or did not answer. When it is `lasting`, asking again will not help."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(errno.EIO, message)
        self.lasting = lasting

    def what_next(self, scheme: str, bucket: str) -> str:
        """The remedy for what the server said."""
        said, prefix = str(self.strerror), VARIABLE_PREFIXES[scheme]
        for words, remedy in _REMEDIES:
            if any(word in said for word in words):
                return remedy.format(
                    prefix=prefix, own=f"SUBLET_BUCKET_{variable_name(bucket)}", keys=_KEYS[scheme]
                )
        return (
            "check that the bucket exists and that these credentials may read, write, list and delete in it"
        )

    def __str__(self) -> str:
        return str(self.strerror)


def status_of(error: Exception) -> str:
    found = re.search(r"status code: (\d{3})", str(error))
    return found.group(1) if found else ""


def explain(error: Exception) -> tuple[str, bool]:
    """What went wrong, in our words, and whether asking again would not help."""
    text = str(error)
    status = status_of(error)
    if status:
        code = re.search(r"<Code>(\w{1,60})</Code>", text)
        said = f"the server answered {status}" + (f" {code.group(1)}" if code else "")
        slow = code is not None and code.group(1) in ("RequestTimeout", "SlowDown", "OperationAborted")
        return said, status.startswith("4") and status not in _PASSING and not slow
    if "redirect" in text.lower():
        return "the server says that it is elsewhere, in another region", True
    if type(error).__name__ in _PERMANENT:
        return {
            "PermissionDeniedError": "the credentials do not allow it",
            "UnauthenticatedError": "the server does not know the credentials",
        }.get(type(error).__name__, f"the request was refused ({type(error).__name__})"), True
    if "kind: Timeout" in text:
        return "no answer in time", False
    if "kind: Connect" in text:
        return "no connection", False
    if "builder error" in text:
        return "an address without TLS, which has to be allowed (…_ALLOW_HTTP=true)", True
    return "the connection broke", False
