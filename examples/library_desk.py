"""A lending desk: who has which book, and for how long."""

from datetime import date, timedelta

LOAN_DAYS = 28


class Desk:
    """Keeps the loans of one library."""

    def __init__(self, books):
        self.books = set(books)
        self.loans = {}

    def lend(self, book, reader, today=None):
        """Lends a book to a reader and returns the date on which it is due."""
        if book not in self.books:
            raise KeyError(f"the library has no book {book!r}")
        if book in self.loans:
            raise ValueError(f"{book!r} is lent to {self.loans[book][0]!r}")
        due = (today or date.today()) + timedelta(days=LOAN_DAYS)
        self.loans[book] = (reader, due)
        return due

    def take_back(self, book):
        """Takes a book back and returns the reader who had it."""
        reader, _ = self.loans.pop(book)
        return reader

    def overdue(self, today=None):
        """Returns the loans that are overdue, the oldest first."""
        today = today or date.today()
        late = [(due, book, reader) for book, (reader, due) in self.loans.items() if due < today]
        return sorted(late)


if __name__ == "__main__":
    desk = Desk(["Middlemarch", "The Trial"])
    desk.lend("The Trial", "Vardanyan", today=date(2026, 1, 5))
    for due, book, reader in desk.overdue(today=date(2026, 3, 1)):
        print(f"{reader} has had {book} since {due - timedelta(days=LOAN_DAYS)}")
