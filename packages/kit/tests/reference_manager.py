"""A cache manager in the shape that step engines with references counted by request have, written anew: room is counted
in embeddings; an entry has a set of requests; one without any is freeable, in the order in which it became so; room
that is free and room that is freeable are counted apart. And a fault of that shape."""

from __future__ import annotations

from collections import OrderedDict


class Request:
    """A request with its items, each by its number: an identifier and how many embeddings it has."""

    def __init__(self, request_id):
        self.request_id = request_id
        self.items = {}

    def number_of(self, identifier, size):
        self.items.setdefault(identifier, size)
        return list(self.items).index(identifier)

    def item(self, number):
        return list(self.items.items())[number]


class ReferenceManager:
    """Sound."""

    def __init__(self, size):
        self.num_free = self.num_freeable = size
        self.cached = {}
        self.freeable = OrderedDict()
        self.freed = []

    def check_and_update_cache(self, request, number):
        """Is the item cached? Then the request refers to it from now on."""
        identifier, size = request.item(number)
        if identifier not in self.cached:
            return False
        if not self.cached[identifier]:
            self.taken_up(identifier, size)
        self.cached[identifier].add(request.request_id)
        return True

    def taken_up(self, identifier, size):
        del self.freeable[identifier]
        self.num_freeable -= size

    def can_allocate(self, request, number, budget):
        """Makes room where there is any to be made."""
        _, size = request.item(number)
        if size > budget or size > self.num_freeable:
            return False
        while size > self.num_free:
            self.evict(*self.freeable.popitem(last=False))
        return True

    def evict(self, identifier, size):
        del self.cached[identifier]
        self.freed.append(identifier)
        self.num_free += size

    def allocate(self, request, number):
        identifier, size = request.item(number)
        self.cached[identifier] = {request.request_id}
        self.num_free -= size
        self.num_freeable -= size

    def free_encoder_input(self, request, number):
        """The request has read the item: called in each later step, too."""
        identifier, size = request.item(number)
        if not self.cached.get(identifier):
            return
        self.cached[identifier].discard(request.request_id)
        if not self.cached[identifier]:
            self.freeable[identifier] = size
            self.num_freeable += size

    def free(self, request):
        for number in range(len(request.items)):
            self.free_encoder_input(request, number)

    def take_back(self, identifier, size):
        """What was allocated in this step will not be encoded, since nobody needs it any more."""
        del self.cached[identifier], self.freeable[identifier]
        self.num_free += size

    def get_freed(self):
        freed, self.freed = self.freed, []
        return freed


class ReferenceAdapter:
    """The part of a scheduler that calls the manager."""

    def __init__(self, manager):
        self.manager, self.requests = manager, {}

    def plan(self, wanted, budget):
        answers, encodes = [], {}
        for word, name, *item in wanted:
            request = self.requests.setdefault(name, Request(name))
            if word == "preempt":
                self.manager.free(request)
                for key in [key for key in encodes if not self.manager.cached.get(key)]:
                    self.manager.take_back(key, encodes.pop(key))
            elif self.manager.check_and_update_cache(request, number := request.number_of(*item)):
                answers.append("hit")
            elif self.manager.can_allocate(request, number, budget - sum(encodes.values())):
                self.manager.allocate(request, number)
                encodes[item[0]] = item[1]
                answers.append("encode")
            else:
                answers.append("later")
        return answers, self.manager.get_freed(), list(encodes)

    def executed(self, failed):
        """The manager is not told."""

    def release(self, name, key):
        self.manager.free_encoder_input(self.requests[name], list(self.requests[name].items).index(key))

    def finish(self, name):
        self.manager.free(self.requests[name])


class OfferedInItsOwnStep(ReferenceManager):
    """E1: what was allocated for a preempted request is evicted in the same step, and its free misses."""

    def take_back(self, identifier, size):
        self.freed.append(identifier)
        super().take_back(identifier, size)


def behind_the_adapter(manager):
    return lambda room: ReferenceAdapter(manager(room))
