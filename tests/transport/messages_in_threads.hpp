// Messages between ranks that are threads of one process.
#pragma once

#include <future>

#include "threads.hpp"

std::vector<std::unique_ptr<Mailbox>> mailboxes(std::vector<std::unique_ptr<Progress>>& ranks) {
  const int n = int(ranks.size()), fd = int(syscall(SYS_memfd_create, "ringdp-mail", 0));
  check(ftruncate(fd, Channels::size(n, kDepth, kSlab)) == 0, "a file for messages");
  std::vector<std::unique_ptr<Mailbox>> found;
  for (int r = 0; r < n; ++r) found.push_back(std::make_unique<Mailbox>(*ranks[r], fd));
  close(fd);
  return found;
}

template <class... How>
std::uint64_t send(Mailbox& mail, How... how) {
  const auto ticket = mail.ticket();
  return mail.send(ticket, how...), ticket;
}
template <class... How>
std::uint64_t receive(Mailbox& mail, How... how) {
  const auto ticket = mail.ticket();
  return mail.receive(ticket, how...), ticket;
}

// All ranks send messages of several lengths under two tags, some before their receive is posted,
// and receive them in another order.
void messages(int n) {
  auto ranks = connected(n);
  auto mail = mailboxes(ranks);
  const std::uint64_t lengths[] = {0, 1, kSlab, kSlab + 1, 40 * kSlab, 7, 9 * kSlab};
  std::vector<std::thread> threads;
  for (int me = 0; me < n; ++me)
    threads.emplace_back([&, me] {
      std::vector<std::vector<std::byte>> in, out;
      std::vector<std::int64_t> sources(n * 8, -1);
      std::vector<std::uint64_t> tickets;
      in.reserve(n * 8), out.reserve(n * 8);
      const auto finish = [&](std::uint64_t ticket) {
        while (!mail[me]->wait(ticket, 0.01)) check(!ranks[me]->failed(), "no failure");
      };
      int k = 0;
      for (const auto bytes : lengths) {
        ++k;
        for (int r = 0; r < n; ++r) {
          if (r == me) continue;
          out.emplace_back(bytes, std::byte(me + k));
          tickets.push_back(
              send(*mail[me], out.back().data(), bytes, std::uint64_t(k) << 24, r, k % 2));
        }
      }
      for (; k > 0; --k)
        for (int r = 0; r < n; ++r) {
          if (r == me) continue;
          in.emplace_back(lengths[k - 1], std::byte(99));
          auto* source = &sources[in.size()];
          const auto ticket = receive(*mail[me], in.back().data(), lengths[k - 1],
                                                std::uint64_t(k) << 24, k % 3 ? r : -1, source, k % 2);
          finish(ticket);
          check(k % 3 == 0 || *source == r, "the sender");
          for (auto b : in.back()) check(b == std::byte(*source + k), "the message");
        }
      for (auto ticket : tickets) finish(ticket);
      if (n < 2) return;
      const int next = (me + 1) % n, before = (me + n - 1) % n, by = me % 2 ? -1 : before;
      const std::uint64_t kind = 9 << 24;
      for (int i = 0; i < 100; ++i) {
        const auto given = std::byte(me + i);
        if (!mail[me]->send_now(&given, 1, kind, next))
          finish(send(*mail[me], &given, std::uint64_t(1), kind, next, false));
        auto found = std::byte(99);
        std::int64_t sender = mail[me]->receive_now(&found, 1, kind, by);
        if (sender < 0) finish(receive(*mail[me], &found, std::uint64_t(1), kind, by, &sender, false));
        check(sender == before && found == std::byte(before + i), "a message that may move at once");
      }
    });
  for (auto& t : threads) t.join();
}

// Rank 1 has received messages through all slots, and finds that the channel is damaged.
template <class Damage>
void damaged(Damage damage) {
  auto ranks = connected(2);
  auto mail = mailboxes(ranks);
  std::byte buffer[8]{};
  std::int64_t source;
  const auto receive = [&] { return ::receive(*mail[1], buffer, 8, 1 << 24, 0, &source, false); };
  for (int i = 0; i < kDepth; ++i) {
    send(*mail[0], buffer, 8, 1 << 24, 1, false);
    check(mail[1]->wait(receive(), 30), "a message");
  }
  std::byte* base = nullptr;
  for (auto& [_, at] : mapped)
    if (*static_cast<std::uint64_t*>(at) != kMagic) base = static_cast<std::byte*>(at);
  damage(base + Fifo<Envelope>::size(kDepth, kSlab));  // the channel from 0 to 1
  check(!mail[1]->wait(receive(), 30), "a message that is none");
  check(ranks[1]->failed()->failure == Failure::damaged && ranks[1]->failed()->rank == 0, "refused");
}
void damaged() {
  damaged([](std::byte* at) {
    const Fifo<Envelope> channel{at, kDepth, kSlab};
    std::memset(&channel.back(), 0x5a, sizeof(Envelope));
    channel.push();
  });
  damaged([](std::byte* at) { reinterpret_cast<Cursors*>(at)->head += 1ull << 40; });
}

// Each call makes progress on a long queue of sends, but does not block until it is empty.
void queued() {
  constexpr int waiting = 400, calls = 200;
  auto ranks = connected(2);
  auto mail = mailboxes(ranks);
  std::vector<std::byte> data(kSlab), found(kSlab);
  const auto send = [&] { return ::send(*mail[0], data.data(), kSlab, 1 << 24, 1, false); };
  for (int i = 0; i < waiting; ++i) send();
  auto receiver = std::async(std::launch::async, [&] {
    std::int64_t source;
    for (int i = 0; i < waiting + calls; ++i) {
      const auto ticket = receive(*mail[1], found.data(), kSlab, 1 << 24, 0, &source, false);
      while (!mail[1]->wait(ticket, 0.01)) check(!ranks[1]->failed(), "no failure");
    }
  });
  std::uint64_t last = 0;
  for (int i = 0; i < calls; ++i) {
    const std::uint64_t before = ranks[0]->messages_sent;
    last = send();
    check(ranks[0]->messages_sent - before <= kDepth * kSlab, "a call sends a little");
  }
  while (!mail[0]->wait(last, 0.01)) check(!ranks[0]->failed(), "no failure");
  receiver.get();
}
