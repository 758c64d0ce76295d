"""Webhook URLs that are accepted or refused, and addresses that count as public."""

import pytest

from scorepool.store import WebhookUrl, is_public

REFUSED = [
    # private IPv4, in every spelling that a resolver accepts
    "https://127.0.0.1/",
    "https://127.1/",
    "https://127.0.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0x7f.0.0.1/",
    "https://0x7F.1/",
    "https://017700000001/",
    "https://0177.0.0.01/",
    "https://127.0.0.1./",
    "https://0/",
    "https://0.0.0.0/",
    "https://10.0.0.8/",
    "https://0xa.0.0.8/",
    "https://172.16.0.1/",
    "https://172.31.255.255/",
    "https://192.168.1.1/",
    "https://3232235777/",
    "https://169.254.169.254/latest/meta-data/",
    "https://0xA9FEA9FE/",
    "https://100.100.100.200/",
    "https://224.0.0.1/",
    "https://255.255.255.255/",
    # digits and dots of other scripts, which IDNA converts to ASCII
    "https://１２７.０.０.１/",
    "https://127。0。0。1/",
    "https://①②⑦.⓪.⓪.①/",
    "https://ｌｏｃａｌｈｏｓｔ/",
    # IPv6
    "https://[::1]/",
    "https://[::]/",
    "https://[0:0:0:0:0:0:0:1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[::127.0.0.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b:1::a00:1]/",
    "https://[2002:7f00:1::]/",
    "https://[2001:0:53aa:64c::]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fd00:ec2::254]/",
    "https://[ff02::1]/",
    "https://[::1",
    # names
    "https://localhost/",
    "https://LOCALHOST./",
    "https://a.localhost/",
    "https://printer.local/",
    "https://metadata.google.internal/",
    "https://redis/",
    "https://redis。/",
    "https://localhost。/",
    "https://127.0.0.1。/",
    "https://a.lan/",
    "https://ａ．ｌａｎ/",
    "https://A.LAN./",
    "https://kubernetes.default.svc/",
    "https://redis.default.svc.cluster.local/",
    "https://host.docker.internal/",
    "https://x.home.arpa/",
    "https://1.0.0.127.in-addr.arpa/",
    "https://x.onion/",
    "https://db.bücher/",
    "https://1.2.3.4.5/",
    "https://ex ample.com/",
    "https://a..b.example/",
    "https://ex%61mple.com/",
    "https://" + "a" * 64 + ".example/",
    "https:///path",
    "https://",
    # not a plain https URL
    "",
    "example.com/hook",
    "//example.com/hook",
    "http://example.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://example.com/",
    "unix:///var/run/docker.sock",
    "http+unix://%2Fvar%2Frun%2Fdocker.sock/",
    "https://user@example.com/",
    "https://user:secret@example.com/",
    "https://@example.com/",
    "https://example.com\\@127.0.0.1/",
    "https://example.com/#part",
    "https://example.com/#",
    "https://example.com/a b",
    "https://example.com/a\r\nX-Evil: 1",
    "https://example.com/\x00",
    "https://example.com/ü",
    "https://example.com/?q=ü",
    # ports
    "https://example.com:0/",
    "https://example.com:22/",
    "https://example.com:25/",
    "https://example.com:445/",
    "https://example.com:65536/",
    "https://example.com:-1/",
    "https://example.com:https/",
]

ACCEPTED = [
    ("https://example.com", ("https", "example.com", 443, "/")),
    ("https://example.com/", ("https", "example.com", 443, "/")),
    ("https://Example.COM./Hook", ("https", "example.com", 443, "/Hook")),
    ("https://example.com/hook?job=1&x=%20", ("https", "example.com", 443, "/hook?job=1&x=%20")),
    ("https://example.com?x=1", ("https", "example.com", 443, "/?x=1")),
    ("https://example.com:8443/", ("https", "example.com", 8443, "/")),
    ("https://example.com:80/", ("https", "example.com", 80, "/")),
    ("https://bücher.example/", ("https", "xn--bcher-kva.example", 443, "/")),
    ("https://россия.рф。/", ("https", "xn--h1alffa9f.xn--p1ai", 443, "/")),
    ("https://hooks.xn--p1ai/", ("https", "hooks.xn--p1ai", 443, "/")),
    ("https://a.co.uk/", ("https", "a.co.uk", 443, "/")),
    ("https://a_b.example/", ("https", "a_b.example", 443, "/")),
    ("https://93.184.215.14/", ("https", "93.184.215.14", 443, "/")),
    ("https://1572395022/", ("https", "93.184.216.14", 443, "/")),
    ("https://[2606:2800:21f:cb07::1]:8443/x", ("https", "2606:2800:21f:cb07::1", 8443, "/x")),
    ("https://hooks.example/y@z", ("https", "hooks.example", 443, "/y@z")),
]


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_that_is_not_plain_public_https_is_refused(url: str):
    with pytest.raises(ValueError, match=r"webhook URL") as refusal:
        WebhookUrl.parse(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(("url", "expected"), ACCEPTED)
def test_a_public_https_url_is_parsed(url: str, expected: tuple[str, str, int, str]):
    parsed = WebhookUrl.parse(url)
    assert (parsed.scheme, parsed.host, parsed.port, parsed.target) == expected


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8123/hook", "http://localhost:8123/", "https://[::1]:9000/", "http://redis:8080/"]
)
def test_the_operator_may_allow_plain_http_and_private_hosts(url: str):
    assert WebhookUrl.parse(url, allow_private=True).port > 0


@pytest.mark.parametrize(
    "url",
    ["http://u:p@localhost/", "ftp://localhost/", "http://localhost:22/", "http://localhost/#a", "http://local host/"],
)
def test_allowing_private_hosts_allows_no_other_malformed_url(url: str):
    with pytest.raises(ValueError, match="webhook URL"):
        WebhookUrl.parse(url, allow_private=True)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0", False),
        ("0.1.2.3", False),
        ("9.255.255.255", True),
        ("10.0.0.0", False),
        ("10.255.255.255", False),
        ("11.0.0.0", True),
        ("100.63.255.255", True),
        ("100.64.0.0", False),
        ("100.127.255.255", False),
        ("100.128.0.0", True),
        ("127.255.255.254", False),
        ("169.254.0.1", False),
        ("172.15.255.255", True),
        ("172.32.0.0", True),
        ("192.0.0.8", False),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("198.18.0.1", False),
        ("198.20.0.0", True),
        ("198.51.100.7", False),
        ("203.0.113.7", False),
        ("223.255.255.255", True),
        ("224.0.0.1", False),
        ("239.1.2.3", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("8.8.8.8", True),
        ("::", False),
        ("::1", False),
        ("::8.8.8.8", False),
        ("::ffff:8.8.8.8", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:0:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", False),
        ("64:ff9b:1::1", False),
        ("100::1", False),
        ("2001::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("2001:10::1", False),
        ("2001:20::1", False),
        ("2001:db8::1", False),
        ("2001:4860:4860::8888", True),
        ("2001:4860:4860::8888%eth0", False),
        ("2002:a00:1::1", False),
        ("2606:4700::1", True),
        ("2a00:1450::1", True),
        ("3fff::1", False),
        ("4000::1", False),
        ("5f00::1", False),
        ("fc00::1", False),
        ("fd12:3456::1", False),
        ("fe80::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("ff0e::1", False),
        ("not an address", False),
    ],
)
def test_an_address_is_public_only_if_it_is_routed_on_the_internet(address: str, expected: bool):
    assert is_public(address) is expected
