"""A drafter that notes how much of its drafts is accepted."""

from __future__ import annotations


class Recording:
    """Mixed in before a drafter's class: `accepted` has what each round of the last request accepted of its draft."""

    def start(self, request):
        session = super().start(request)
        observe, self.accepted = session.observe, None

        def spy(tokens, features, lengths):
            if self.accepted is None:  # the prompt
                self.accepted = []
            else:
                self.accepted.append(int(lengths[0]) - 1)
            observe(tokens, features, lengths)

        session.observe = spy
        return session
