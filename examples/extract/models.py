"""What each set of documents is extracted into. A class' docstring and its fields' descriptions are shown to the model."""

from __future__ import annotations

import datetime
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


class Item(BaseModel):
    description: str = Field(min_length=1, max_length=80)
    quantity: int = Field(ge=1, le=100_000)
    unit_price: float = Field(ge=0, description="before tax")


class Invoice(BaseModel):
    number: str = Field(min_length=1, max_length=30, description="the number of the invoice, as written")
    vendor: str = Field(min_length=1, max_length=80, description="the company that sends the invoice")
    customer: str = Field(min_length=1, max_length=80)
    date: datetime.date = Field(description="of issue")
    due: datetime.date | None
    currency: Literal["EUR", "USD", "GBP", "CHF", "SEK", "JPY"]
    items: list[Item] = Field(max_length=8)
    tax_rate: float | None = Field(ge=0, le=100, description="in percent")
    total: float = Field(ge=0, description="the amount to pay, with tax")
    purchase_order: str | None = Field(max_length=30)


# Adds up, which a schema cannot say: a row that does not is asked for again, with the difference.
class CheckedInvoice(Invoice):
    @model_validator(mode="after")
    def adds_up(self) -> Self:
        net = sum(item.quantity * item.unit_price for item in self.items)
        expected = net * (1 + (self.tax_rate or 0) / 100)
        rounding = 1 if self.currency == "JPY" else 0.02
        if self.items and abs(expected - self.total) > rounding + 0.0001 * expected:
            raise ValueError(f"total is {self.total:.2f}, but the items and the tax are {expected:.2f} together")
        if self.due is not None and self.due < self.date:
            raise ValueError(f"due is {self.due}, before the date of the invoice, {self.date}")
        return self


# One level of scalars: the rows can be written as CSV too.
class Ticket(BaseModel):
    customer: str = Field(min_length=1, max_length=60)
    product: str = Field(min_length=1, max_length=40)
    version: str | None = Field(max_length=20)
    category: Literal["billing", "bug", "account", "delivery", "question"]
    urgency: Literal["low", "normal", "high"]
    order: str | None = Field(max_length=20, description="the order number")
    amount: float | None = Field(ge=0, description="the sum of money in question")
    refund: bool = Field(description="whether the customer asks for money back")


class Author(BaseModel):
    name: str = Field(min_length=1, max_length=60)
    affiliation: str | None = Field(max_length=100)
    email: str | None = Field(max_length=80)


class Paper(BaseModel):
    title: str = Field(min_length=1, max_length=160)
    authors: list[Author] = Field(max_length=20)
    year: int = Field(ge=1900, le=2100)
    venue: str | None = Field(max_length=100)
    keywords: list[str] = Field(max_length=12)
    doi: str | None = Field(max_length=60)
