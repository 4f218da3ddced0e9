// What calls under way use, by ticket: it is alive until they have ended, whoever goes on without them.
#pragma once

#include <nanobind/nanobind.h>

namespace ringdp {

namespace nb = nanobind;

// To be called before C++ returns: Python raises KeyboardInterrupt at that very call, so its caller may
// never see the ticket, and what it passed goes with its frame.
template <class Ticket>
Ticket keep(const nb::dict& kept, Ticket ticket, nb::handle used) {
  kept[nb::int_(ticket)] = used;
  return ticket;
}

}  // namespace ringdp
