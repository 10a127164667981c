"""The chat page as its reader sees it."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, Request, expect

from tests.processes import PATIENCE_SECONDS

expect.set_options(timeout=PATIENCE_SECONDS * 1000)


class OpenedPage:
    """The page in a browser profile of its own."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.problems: list[str] = []
        self.host = urlsplit(url).netloc
        context.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.page: Page = context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note_console)
        self.page.on("request", self._note_request)
        self.page.goto(url)
        expect(self.model_picker).not_to_have_text("Loading…")

    def close(self) -> None:
        """No script has failed, nothing was against the policy, and no other server was asked for anything."""
        self.context.close()
        assert self.problems == []

    def _note_console(self, message: ConsoleMessage) -> None:
        # The browser itself writes a line for every error of the server.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.problems.append(message.text)

    def _note_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.netloc != self.host and address.scheme != "blob":
            self.problems.append(request.url)

    def second_tab(self) -> OpenedPage:
        """The same address in another tab."""
        return OpenedPage(self.context, self.page.url)

    @property
    def composer(self) -> Locator:
        return self.page.get_by_label("Message", exact=True)

    @property
    def model_picker(self) -> Locator:
        return self.page.get_by_role("combobox", name="Model")

    @property
    def replies(self) -> Locator:
        return self.page.locator("article.assistant")

    @property
    def reply(self) -> Locator:
        """The text of the last reply, without its reasoning."""
        return self.replies.last.locator("> .markdown")

    @property
    def questions(self) -> Locator:
        return self.page.get_by_label("You", exact=True)

    @property
    def sidebar(self) -> Locator:
        return self.page.get_by_role("complementary", name="Conversations")

    @property
    def notice(self) -> Locator:
        return self.page.locator("#notice")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def send(self, text: str) -> None:
        self.composer.fill(text)
        self.composer.press("Enter")

    def begin(self, text: str) -> None:
        """Send a message and wait until the reply has its place."""
        number = self.replies.count()
        self.send(text)
        expect(self.replies).to_have_count(number + 1)

    def ask(self, text: str, *answers: str) -> None:
        """Send a message and wait for the whole reply; each answer must be in it."""
        self.begin(text)
        self.wait_complete()
        for answer in answers:
            expect(self.replies.last).to_contain_text(answer)

    def wait_complete(self) -> None:
        expect(self.page.locator("#send")).to_be_visible()

    def set(self, **fields: str) -> None:
        """Change settings by the names of their fields, and save them."""
        self.button("Settings").click()
        for name, value in fields.items():
            field = self.page.locator(f"#settings [name={name}]")
            if not field.is_visible():
                self.page.get_by_text("Further parameters and tools").click()
            field.fill(value)
        self.button("Save").click()

    def reload(self) -> None:
        self.page.reload()
        expect(self.model_picker).not_to_have_text("Loading…")
