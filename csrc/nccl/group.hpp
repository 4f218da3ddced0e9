// Groups: calls are collected until the outermost ncclGroupEnd, which runs all of them at once.
//
// Every call becomes messages over channels. The messages of one channel go one after the other, all
// channels advance side by side, and a send ends only when its receiver has taken all of it. This is the
// strictest reading of NCCL: a program that relies on buffering hangs.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <tuple>
#include <vector>

#include "comm.hpp"
#include "fault.hpp"

namespace hostnccl {

enum class Step { none, moved, over, refused };

struct Message {
  Comm comm;
  Lane lane;
  bool sends;
  int peer;
  std::byte* data;
  Label label;
  std::uint64_t done = 0;  // bytes
  bool begun = false;      // an empty message takes a slot, too

  Channel channel() {
    const int me = comm->rank;
    return sends ? comm->shared.channel(lane, me, peer) : comm->shared.channel(lane, peer, me);
  }

  // Moves up to one slab.
  Step advance() {
    // relaxed, also below: the flag publishes no other data
    if (comm->shared.header().refused.load(std::memory_order_relaxed)) return Step::refused;
    return sends ? send(channel()) : receive(channel());
  }

 private:
  bool whole() const { return begun && done == label.bytes; }

  Step send(Channel way) {
    if (whole()) return way.unread() == 0 ? Step::over : Step::none;
    if (way.full()) return Step::none;
    way.back() = label;
    pass(way.data(way.back()), data + done);
    way.push();
    return Step::moved;
  }

  Step receive(Channel way) {
    if (way.empty()) return Step::none;
    if (!(way.front() == label)) {
      comm->shared.header().refused.store(true, std::memory_order_relaxed);
      return Step::refused;
    }
    pass(data + done, way.data(way.front()));
    way.pop();
    return whole() ? Step::over : Step::moved;
  }

  void pass(std::byte* to, const std::byte* from) {
    const std::size_t some = std::min<std::uint64_t>(kSlab, label.bytes - done);
    ringdp::copy_bytes(to, from, some);
    done += some;
    begun = true;
  }
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // of the first invalid call
  std::vector<Comm> comms;           // of all calls
  std::vector<Message> messages;
  std::vector<std::function<void()>> after;  // run once all messages have arrived
};

inline Group& group() {
  thread_local Group the;
  return the;
}

// Communicators on which this thread launches, and no other may.
struct Claimed : std::vector<Comm> {
  ~Claimed() {
    for (const Comm& comm : *this) comm->busy.store(false);
  }
};

// NCCL refuses a rank's send to itself unless a receive of the same group takes it.
inline bool paired_with_itself(const std::vector<Message>& messages) {
  std::map<std::pair<ncclComm*, Lane>, int> open;
  for (const Message& m : messages)
    if (m.peer == m.comm->rank) open[{m.comm.get(), m.lane}] += m.sends ? 1 : -1;
  return std::all_of(open.begin(), open.end(), [](const auto& left) { return left.second == 0; });
}

inline ncclResult_t run(std::vector<Message>& messages, const std::vector<Comm>& comms) {
  std::map<std::tuple<ncclComm*, Lane, bool, int>, std::deque<Message*>> lines;
  for (Message& m : messages) lines[{m.comm.get(), m.lane, m.sends, m.peer}].push_back(&m);
  std::size_t left = messages.size();
  for (Pause pause; left;) {
    bool moved = false;
    for (auto& [_, line] : lines) {
      if (line.empty()) continue;
      const Step step = line.front()->advance();
      if (step == Step::refused) return ncclInvalidUsage;
      moved |= step != Step::none;
      if (step == Step::over) {
        line.pop_front();
        --left;
      }
    }
    for (const Comm& comm : comms)
      if (comm->aborted.load(std::memory_order_relaxed)) return ncclInternalError;
    if (moved) pause.reset();
    else pause.rest();
  }
  return ncclSuccess;
}

inline ncclResult_t stall(const std::vector<Comm>& comms) {
  for (Pause pause;; pause.rest())
    for (const Comm& comm : comms)
      if (comm->aborted.load(std::memory_order_relaxed)) return ncclInternalError;
}

inline ncclResult_t launch(Group& ready) {
  if (ready.comms.empty()) return ncclSuccess;
  if (!paired_with_itself(ready.messages)) return ncclInvalidUsage;
  Claimed comms;
  for (const Comm& comm : ready.comms) {
    if (std::find(comms.begin(), comms.end(), comm) != comms.end()) continue;
    if (comm->busy.exchange(true)) return ncclInvalidUsage;
    comms.push_back(comm);
  }
  ncclResult_t result;
  switch (due()) {
    case Fault::fail: result = request.result.load(); break;
    case Fault::stall: result = stall(comms); break;
    default: result = run(ready.messages, comms);
  }
  if (result != ncclSuccess) {
    for (const Comm& comm : comms) comm->error.store(result);
    return result;
  }
  for (const auto& act : ready.after) act();
  return ncclSuccess;
}

inline ncclResult_t end_group() {
  Group& open = group();
  if (open.depth == 0) return ncclInvalidUsage;
  if (--open.depth) return ncclSuccess;
  Group ready;
  std::swap(open, ready);
  return ready.error != ncclSuccess ? ready.error : launch(ready);
}

// Adds a call to the open group, or runs it as a group of its own.
template <class Call, class... Arguments>
ncclResult_t enqueue(ncclComm* handle, const Call& call, const Arguments&... arguments) {
  ++group().depth;
  const Comm comm = find(handle);
  ncclResult_t result = ncclInvalidArgument;
  try {
    if (comm) result = call(comm, group(), arguments...);
  } catch (const std::exception&) {  // no memory; the caller is C
    result = ncclSystemError;
  }
  if (comm) group().comms.push_back(comm);
  if (group().error == ncclSuccess) group().error = result;
  const ncclResult_t ended = end_group();
  return result != ncclSuccess ? result : ended;
}

}  // namespace hostnccl
