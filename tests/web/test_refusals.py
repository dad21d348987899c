"""Who may use the server: hosts, origins, security headers, and answers to failures."""

from collections.abc import Callable

import pytest
import torch
from starlette.testclient import TestClient
from torch import nn

from sufficit import Classifier, View
from sufficit.web import Service, open_service

HOSTS = {
    "localhost": True, "localhost:8000": True, "LOCALHOST": True, "127.0.0.1": True,
    "127.0.0.1:8000": True, "[::1]:8000": True, "[::1]": True, "evil.example": False,
    "127.0.0.1.evil.example": False, "192.168.0.9": False, "": False,
    "localhost@evil.example": False, "localhost:port": False, "localhost/x": False, "[::1": False,
    "localhost:80:80": False, "localhost evil.example": False, "[::1]evil.example": False,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_only_names_of_this_machine_are_hosts(client: TestClient, host: str) -> None:
    answer = client.get("/api/model", headers={"host": host})
    assert answer.status_code == (200 if HOSTS[host] else 400)
    assert "access-control-allow-origin" not in answer.headers


def test_a_server_answers_to_the_names_it_is_given(
    service: Service, client_of: Callable[..., TestClient]
) -> None:
    client = client_of(service, names=["Models.example"])

    def status(host: str) -> int:
        return client.get("/api/model", headers={"host": host}).status_code

    assert status("models.example:8000") == status("localhost") == 200
    assert status("x.models.example") == status("evil.example") == 400


def test_pages_of_other_sites_are_refused(client: TestClient, digit: bytes) -> None:
    for headers, status in (
        ({"origin": "http://127.0.0.1"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ):
        data = {"methods": "center"}
        answer = client.post("/api/explain", files={"file": digit}, data=data, headers=headers)
        assert answer.status_code == status, headers


def test_a_link_from_another_site_may_open_the_page(client: TestClient) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


def test_every_answer_has_the_security_headers(client: TestClient) -> None:
    for path in ("/", "/docs", "/api/model", "/nowhere"):
        check_security(client.get(path).headers)
    check_security(client.get("/", headers={"host": "evil.example"}).headers)
    check_security(client.get("/", headers={"origin": "https://evil.example"}).headers)
    assert client.get("/nowhere").json() == {"error": "Not Found"}
    assert client.get("/api/score").status_code == 405


def check_security(headers: object) -> None:
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]


class Broken(nn.Module):
    """Works on the grey image of the first trial and on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.std() > 0.01:
            raise RuntimeError("a secret path: /home/me")
        return self.features(images).mean((2, 3))


def test_a_failing_model_answers_500_without_its_traceback(
    client_of: Callable[..., TestClient], digit: bytes
) -> None:
    broken = Classifier(Broken(), "features", view=View(crop=(16, 16)))
    client = client_of(open_service(broken, "broken"))
    answer = client.post("/api/explain", files={"file": digit})
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal server error: see the server log"}
    check_security(answer.headers)
