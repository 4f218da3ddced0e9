// Python bindings of the shared-memory transport and the CPU kernels: pointers and integers only, no torch
// ABI.
#include <cstdio>
#include <cstdlib>

#include <pthread.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "grouping.hpp"
#include "kernels.hpp"
#include "launches.hpp"
#include "mailbox.hpp"
#include "repeated.hpp"
#include "watch.hpp"

using namespace ringdp;

namespace {

const RankRecord& record_of(const Records& records, int rank) {
  if (rank < 0 || rank >= records.ranks())
    throw nb::index_error(("rank " + std::to_string(rank) + " of " + std::to_string(records.ranks())).c_str());
  return records.record(rank);
}

Prepared::Buffer buffer_of(nb::handle tensor) {
  const auto at = tensor.is_none() ? 0 : nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());
  return {tensor, reinterpret_cast<std::byte*>(at)};
}

// Calls `act` without the GIL, as it may wait for a thread that moves bytes.
template <class Act>
auto freely(Act act) {
  nb::gil_scoped_release free;
  return act();
}

// Begins a message and returns its ticket for Python. What it uses is kept before `begin`, since another
// thread may see the message end at once.
template <class Begin>
std::int64_t begun(Mailbox& mail, const nb::dict& kept, nb::handle used, Begin begin) {
  const auto ticket = mail.ticket();
  const auto here = keep(kept, -std::int64_t(ticket), used);
  try {
    freely([&] { begin(ticket); });
  } catch (...) {  // no memory
    nb::del(kept[nb::int_(here)]);
    throw;
  }
  return here;
}

nb::tuple record_tuple(const RankRecord& r) {
  return nb::make_tuple(r.pid.load(), r.begun.load(std::memory_order_acquire), r.finished.load(),
                        r.round.load(), r.peer.load(), r.changed.load());
}

nb::object call_tuple(const std::optional<CallInfo>& info) {
  if (!info) return nb::none();
  const auto* site = reinterpret_cast<const char*>(info->site.data());
  return nb::make_tuple(info->number, info->kind, info->elements, nb::bytes(site, strnlen(site, kSite)));
}

PyType_Slot ready_slots[] = {  // for Python's garbage collector
    {Py_tp_traverse, reinterpret_cast<void*>(+[](PyObject* self, visitproc visit, void* arg) {
       Py_VISIT(Py_TYPE(self));
       return nb::inst_ready(self) ? nb::inst_ptr<Ready>(self)->visit(visit, arg) : 0;
     })},
    {Py_tp_clear, reinterpret_cast<void*>(+[](PyObject* self) {
       nb::inst_ptr<Ready>(self)->forget();
       return 0;
     })},
    {0, nullptr}};

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // after an error at exit, frames keep transports alive
  m.def("segment_size", &Segment::size, nb::arg("ranks"), nb::arg("depth"), nb::arg("slab"),
        "Bytes of a shared segment.");
  m.attr("SITE_BYTES") = kSite;
  m.attr("SLICE") = kSlice;
  m.attr("CALLS") = kCalls;
  m.attr("CALL_CELLS") = kCallCells;

  nb::class_<Records>(m, "Records")
      .def("record", [](Records& self, int rank) { return record_tuple(record_of(self, rank)); })
      .def("call", [](Records& self, int rank, std::uint64_t number) {
             return call_tuple(record_of(self, rank).call(number));
           })
      .def("message", [](Records& self, int rank) {
        return call_tuple(record_of(self, rank).message.read());
      });

  nb::class_<Progress, Records>(m, "Progress")
      .def(
          "__init__",
          [](Progress* self, int fd, int rank, int ranks, int depth, std::size_t slab,
             std::uint64_t token, std::uintptr_t arena, std::size_t arena_bytes, double latency,
             double bandwidth, int stride) {
            new (self) Progress(fd, rank, {ranks, depth, slab}, token,
                                {reinterpret_cast<std::byte*>(arena), arena_bytes},
                                {latency, bandwidth, stride});
          },
          nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"), nb::arg("depth"), nb::arg("slab"),
          nb::arg("token"), nb::arg("arena"), nb::arg("arena_bytes"), nb::arg("latency"),
          nb::arg("bandwidth"), nb::arg("stride"))
      .def("connect", &Progress::connect)
      .def("wait", &Progress::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("failed",
           [](Progress& self) -> nb::object {
             auto f = self.failed();
             if (!f) return nb::none();
             return nb::make_tuple(int(f->failure), f->rank, f->reporter, f->expected.number,
                                   f->expected.digest, f->expected.bytes, f->found.number,
                                   f->found.digest, f->found.bytes, f->why.c_str());
           })
      .def("fail", [](Progress& self, int kind, int rank) { self.fail({Failure(kind), rank}); })
      .def("finished", &Progress::finished)
      .def_ro("issued", &Progress::issued)
      .def("left_alone", &Progress::left_alone)
      .def("waits_for_message",
           [](Progress& self, std::uint64_t number, std::uint64_t kind, std::uint64_t elements,
              nb::bytes site) {
             self.segment().record(self.rank()).message.write(number, kind, elements, checked(site));
           })
      .def("has_message", [](Progress& self) { self.segment().record(self.rank()).message.clear(); })
      .def("sent_bytes", &Progress::sent)
      .def("trace", &Progress::trace)
      .def("untrace", &Progress::untrace)
      .def("tape",
           [](Progress& self) {
             const auto done = self.tape().take(), waited = self.waits().take();
             const auto lost = self.tape().lost() + self.waits().lost();
             return nb::make_tuple(nb::bytes(done.data(), done.size()),
                                   nb::bytes(waited.data(), waited.size()), lost);
           })
      .def("close", &Progress::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Prepared>(m, "Prepared")
      .def_static(
          "exchange",
          [](Progress& core, int collective, int root, std::vector<std::int64_t> bounds,
             std::vector<std::int64_t> received, int dtype_code, int op, std::uint64_t kind, nb::dict kept) {
            return new Prepared(core, Collective(collective), root, std::move(bounds), std::move(received),
                                dtype(dtype_code, op), kind, std::move(kept));
          },
          nb::keep_alive<0, 1>())
      .def_static(
          "program",
          [](Progress& core, nb::object program, std::uintptr_t rows, std::size_t count, int chunks,
             int scratch, bool changes, std::vector<std::int64_t> bounds, int dtype_code, int op,
             std::uint64_t kind, std::int64_t elements, nb::dict kept) {
            const Rows what{reinterpret_cast<const Row*>(rows), count, nullptr, chunks, scratch, nullptr};
            return new Prepared(core, std::move(program), what, changes, std::move(bounds),
                                dtype(dtype_code, op), kind, elements, std::move(kept));
          },
          nb::keep_alive<0, 1>())
      .def("start",
           [](Prepared& self, nb::object whole, nb::object part, nb::bytes site) {
             return self.start(buffer_of(whole), buffer_of(part), site);
           },
           nb::arg("whole").none(), nb::arg("part").none(), nb::arg("site"))
      .def("run",
           [](Prepared& self, nb::object whole, nb::object part, nb::bytes site) {
             return self.run(buffer_of(whole), buffer_of(part), site);
           },
           nb::arg("whole").none(), nb::arg("part").none(), nb::arg("site"));

  nb::class_<Ready>(m, "Ready", nb::type_slots(ready_slots))
      .def(nb::init<int, int, nb::handle, nb::handle, nb::handle, nb::object>(), nb::arg("rank"),
           nb::arg("ranks"), nb::arg("table"), nb::arg("tensor"), nb::arg("parameter"), nb::arg("mailbox"))
      .def_ro("messages", &Ready::messages)
      .def_prop_rw("told", [](Ready&) { return Sites::of_python().told; },
                   [](Ready&, bool told) { Sites::of_python().told = told; })
      .def("learn", &Ready::learn)
      .def("forget", &Ready::forget)
      .def("remember", &Ready::remember);
  nb::class_<Grouping>(m, "Grouping")
      .def(nb::init<nb::object, nb::object, bool>(), nb::arg("comm"), nb::arg("group"), nb::arg("waits"))
      .def("__enter__", &Grouping::enter)
      .def("__exit__", [](Grouping& self, nb::args error) { self.exit(error[0]); });
  m.attr("Repeated") = repeated_type();
  m.def("call_site", [] { return Sites::of_python().here(); });
  m.def("learn_sites", [](nb::object line, nb::bytes nowhere) {
    Sites::of_python().learn(std::move(line), std::move(nowhere));
  });

  m.def("mailbox_size", &Channels::size, nb::arg("ranks"), nb::arg("depth"), nb::arg("slab"),
        "Bytes of the file for messages.");
  nb::class_<Mailbox>(m, "Mailbox")  // in Python its tickets are negative, unlike those of Progress
      .def(nb::init<Progress&, int>(), nb::keep_alive<1, 2>(), nb::arg("progress"), nb::arg("fd"))
      .def("send",
           [](Mailbox& self, std::uintptr_t data, std::uint64_t bytes, std::uint64_t kind, int to,
              bool background, nb::dict kept, nb::object used) {
             return begun(self, kept, used, [&](std::uint64_t ticket) {
               self.send(ticket, reinterpret_cast<const std::byte*>(data), bytes, kind, to, background);
             });
           })
      .def("receive",
           [](Mailbox& self, std::uintptr_t data, std::uint64_t bytes, std::uint64_t kind, int from,
              std::uintptr_t source, bool background, nb::dict kept, nb::object used) {
             return begun(self, kept, used, [&](std::uint64_t ticket) {
               self.receive(ticket, reinterpret_cast<std::byte*>(data), bytes, kind, from,
                            reinterpret_cast<std::int64_t*>(source), background);
             });
           })
      .def("wait",
           [](Mailbox& self, std::int64_t ticket, double seconds) { return self.wait(-ticket, seconds); },
           nb::call_guard<nb::gil_scoped_release>())
      .def("ended",
           [](Mailbox& self) {
             std::vector<std::int64_t> tickets;
             for (const auto ticket : freely([&] { return self.ended(); })) tickets.push_back(-ticket);
             return tickets;
           })
      .def("close", &Mailbox::close, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Watch, Records>(m, "Watch")
      .def(nb::init<int>(), nb::arg("fd"))
      .def_prop_ro("ranks", &Watch::ranks)
      .def_prop_ro("failed",
                   [](Watch& self) {
                     const Failed f = unpacked(self.header().failed.load());
                     return nb::make_tuple(int(f.failure), f.rank);
                   });
  m.def(
      "use_openmp",
      [](std::uintptr_t parallel, std::uintptr_t thread) {
        openmp = {reinterpret_cast<decltype(openmp.parallel)>(parallel),
                  reinterpret_cast<decltype(openmp.thread)>(thread)};
        pthread_atfork(nullptr, nullptr, [] { openmp = {}; });
      },
      nb::arg("parallel"), nb::arg("thread"),
      "Gives the kernels threads: the addresses of GOMP_parallel and omp_get_thread_num.");
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), nb::arg("table"), nb::arg("tensor"),
           nb::arg("parameter"))
      .def("flatten", &Kernels::flatten)
      .def("unflatten", &Kernels::unflatten)
      .def("unscale", &Kernels::unscale)
      .def("fold", &Kernels::fold, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
      .def("stochastic_round", &Kernels::stochastic_round)
      .def("adamw", &Kernels::adamw, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
           nb::arg())
      .def("squared_norm", &Kernels::squared_norm);
  nb::class_<Driver>(m, "Driver")
      .def(
          "__init__",
          [](Driver* self, const std::array<std::uintptr_t, 4>& functions) {
            new (self) Driver;
            std::memcpy(self, functions.data(), sizeof *self);
          },
          nb::arg("functions"));
  nb::class_<Launch>(m, "Launch")
      .def(nb::init<const Driver&, std::uintptr_t, unsigned, unsigned, unsigned, std::string_view,
                    nb::tuple>(),
           nb::arg("driver"), nb::arg("function"), nb::arg("programs"), nb::arg("threads"),
           nb::arg("shared"), nb::arg("kinds"), nb::arg("values"))
      .def("run",
           [](const Launch& self, std::intptr_t stream, nb::tuple late) {
             return self.run(reinterpret_cast<void*>(stream), late);
           },
           nb::arg("stream"), nb::arg("late"));
  nb::class_<Repeats>(m, "Repeats")
      .def(nb::init<nb::handle, nb::handle, nb::handle, std::size_t, std::size_t>(), nb::arg("table"),
           nb::arg("tensor"), nb::arg("parameter"), nb::arg("calls"), nb::arg("bytes"))
      .def("again", &Repeats::again, nb::arg("tensors"), nb::arg("offsets").none(), nb::arg("late"))
      .def("keep", &Repeats::keep, nb::arg("tensors"), nb::arg("offsets").none(), nb::arg("launches"),
           nb::arg("held") = nb::list());
  m.def(
      "abandon",
      [](nb::object mailbox, nb::object progress) {
        nb::cast<Mailbox&>(mailbox).close_file();
        nb::cast<Progress&>(progress).segment().close_handles();
        mailbox.release();
        progress.release();
      },
      nb::arg("mailbox"), nb::arg("progress"),
      "Closes the descriptors of these objects in a forked child, and never destroys them, as it has neither "
      "their threads nor their memory.");
  m.def(
      "fail_at_exit",
      [] {
        std::atexit([] {
          std::fflush(nullptr);
          std::_Exit(1);
        });
      },
      "Makes the process exit with 1 after Python's exit handlers, which cannot change the exit code.");
}
