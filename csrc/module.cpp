// The Python face of the shared-memory transport: pointers and integers only, no torch ABI.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "progress.hpp"

namespace nb = nanobind;
using namespace ringdp;

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // an exit with an error keeps frames, and so transports, alive
  m.def("segment_size", &Segment::size, nb::arg("ranks"), nb::arg("depth"), nb::arg("slab"),
        "Bytes of a shared segment.");

  nb::class_<Progress>(m, "Progress")
      .def(
          "__init__",
          [](Progress* self, int fd, int rank, int ranks, int depth, std::size_t slab,
             std::uint64_t token, std::uintptr_t arena, std::size_t arena_bytes, double latency,
             double bandwidth) {
            new (self) Progress(fd, rank, {ranks, depth, slab}, token,
                                {reinterpret_cast<std::byte*>(arena), arena_bytes},
                                {latency, bandwidth});
          },
          nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"), nb::arg("depth"), nb::arg("slab"),
          nb::arg("token"), nb::arg("arena"), nb::arg("arena_bytes"), nb::arg("latency"),
          nb::arg("bandwidth"))
      .def("connect", &Progress::connect)
      .def(
          "start",
          [](Progress& self, std::uintptr_t rows, std::size_t row_count, std::uintptr_t bounds,
             int chunks, int scratch, std::uintptr_t buffer, int dtype_code, int op,
             std::uint64_t number, std::uint64_t kind, bool background) {
            const auto* cuts = reinterpret_cast<const std::int64_t*>(bounds);
            const Rows what{reinterpret_cast<const Row*>(rows), row_count, cuts, chunks, scratch,
                            reinterpret_cast<std::byte*>(buffer)};
            return self.start({what, dtype(dtype_code, op), number, kind, cuts[chunks]}, background);
          })
      .def(
          "exchange",
          [](Progress& self, int collective, std::uintptr_t bounds, std::uintptr_t whole,
             std::uintptr_t part, int dtype_code, int op, std::uint64_t number, std::uint64_t kind,
             bool background) {
            const auto* cuts = reinterpret_cast<const std::int64_t*>(bounds);
            const Exchange what{Collective(collective), cuts, reinterpret_cast<std::byte*>(whole),
                                reinterpret_cast<std::byte*>(part)};
            const auto elements = cuts[self.segment().ranks()];
            return self.start({what, dtype(dtype_code, op), number, kind, elements}, background);
          })
      .def("wait", &Progress::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("failed",
           [](Progress& self) -> nb::object {
             auto f = self.failed();
             if (!f) return nb::none();
             return nb::make_tuple(int(f->failure), f->rank, f->reported, f->expected.number,
                                   f->expected.kind, f->expected.bytes, f->found.number,
                                   f->found.kind, f->found.bytes);
           })
      .def("fail", [](Progress& self, int kind, int rank) { self.fail(Failure(kind), rank); })
      .def("position",
           [](Progress& self) {
             auto& p = self.peers().position;
             return nb::make_tuple(p.number.load(), p.round.load(), p.peer.load());
           })
      .def("finished", &Progress::finished)
      .def("record",
           [](Progress& self, int rank) {
             auto& r = self.segment().record(rank);
             return nb::make_tuple(r.begun.load(), r.kind.load(), r.elements.load());
           })
      .def("sent_bytes", [](Progress& self) { return self.peers().sent_bytes.load(); })
      .def("close", &Progress::close, nb::call_guard<nb::gil_scoped_release>());
  m.def("abandon", [](nb::object core) { core.release(); }, nb::arg("core"),
        "Never destroy `core`: a forked child holds it without its thread and its memory.");
}
