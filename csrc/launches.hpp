// Repeats a call's kernel launches for tensors at the same addresses, in one call from Python.
//
// An allocator gives the tensors of a step the addresses of the previous step's. Checking them and working
// out what to launch takes the host several times as long as a launch. So it is done once for tensors that
// agree in everything that checks and launchers look at.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tensors.hpp"

namespace ringdp {

// Functions of the CUDA driver, which return 0 or an error. Python finds them: most machines have no driver
// to link to.
struct Driver {
  int (*get_context)(void** context);               // cuCtxGetCurrent
  int (*get_capturing)(void* stream, int* status);  // cuStreamIsCapturing
  int (*launch)(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                unsigned threads_z, unsigned shared, void* stream, void** arguments, void** extra);
  int (*get_text)(int error, const char** text);  // cuGetErrorString

  void* context() const {
    void* found = nullptr;
    return get_context(&found) == 0 ? found : nullptr;
  }
  bool capturing(void* stream) const {
    int status = 0;
    return stream && (get_capturing(stream, &status) != 0 || status);  // the default stream, 0, cannot be
  }
};

// A launch in one dimension. Its last arguments are given each time.
class Launch {
 public:
  // `kinds` has a letter for each argument: i for integers and addresses, f for float32, d for float64, and
  // at the end 0 for a null pointer, which is never given. `values` are the first arguments.
  Launch(const Driver& driver, std::uintptr_t function, unsigned programs, unsigned threads, unsigned shared,
         std::string_view kinds, nb::tuple values)
      : driver_(driver), function_(reinterpret_cast<void*>(function)), programs_(programs),
        threads_(threads), shared_(shared), given_(nb::len(values)), count_(kinds.size()),
        taken_(std::min(kinds.find('0'), count_)) {
    if (count_ > kMost || given_ > taken_) throw std::invalid_argument("a launch has too many arguments");
    std::copy(kinds.begin(), kinds.end(), kinds_.begin());
    put(values, 0, cells_);
  }

  // Returns false, and launches nothing, in a thread without a CUDA context.
  bool run(void* stream, nb::tuple late) const {
    if (const auto n = given_ + nb::len(late); n != taken_)
      throw std::invalid_argument("a launch takes " + std::to_string(taken_) + " arguments, not " +
                                  std::to_string(n));
    if (!driver_.context()) return false;
    const Driver driver = driver_;
    Cells cells = cells_;  // several threads may run this
    put(late, given_, cells);
    std::array<void*, kMost> places;
    for (std::size_t i = 0; i < count_; ++i) places[i] = &cells[i];
    int error;
    {
      nb::gil_scoped_release free;  // the driver waits while the device's queue is full
      error = driver.launch(function_, programs_, 1, 1, threads_, 1, 1, shared_, stream, places.data(),
                            nullptr);
    }
    if (!error) return true;
    const char* text = "unknown error";
    driver.get_text(error, &text);
    throw std::runtime_error(std::string("Triton Error [CUDA]: ") + text);  // as Triton's launcher says it
  }

  const Driver& driver() const { return driver_; }

 private:
  static constexpr std::size_t kMost = 32;
  using Cells = std::array<std::uint64_t, kMost>;  // the driver reads as many bytes of each as it needs

  void put(nb::tuple values, std::size_t place, Cells& cells) const {
    for (nb::handle value : values) {
      if (kinds_[place] == 'i') {
        cells[place] = PyLong_AsUnsignedLongLongMask(value.ptr());
      } else {
        const double wide = PyFloat_AsDouble(value.ptr());
        const float narrow = float(wide);
        if (kinds_[place] == 'f') std::memcpy(&cells[place], &narrow, sizeof narrow);
        else std::memcpy(&cells[place], &wide, sizeof wide);
      }
      if (PyErr_Occurred()) throw nb::python_error();
      ++place;
    }
  }

  Driver driver_;
  void* function_;
  unsigned programs_, threads_, shared_;
  std::size_t given_, count_, taken_;  // arguments: first, in all, and without null pointers
  std::array<char, kMost> kinds_{};
  Cells cells_{};
};

// The launches of a function's calls.
class Repeats {
 public:
  // Keeps at most so many calls, whose `held` tensors have at most so many bytes, and always the last one.
  Repeats(nb::handle table, nb::handle tensor, nb::handle parameter, std::size_t calls, std::size_t bytes)
      : tensors_(table, tensor, parameter), most_calls_(calls), most_bytes_(bytes) {}

  // Repeats the launches kept for these tensors and offsets (or None), with `late` as each one's last
  // arguments. Returns false, and does nothing, if there are none.
  bool again(nb::list tensors, nb::handle offsets, nb::tuple late) {
    if (kept_.empty()) return false;
    const auto key = key_of(tensors, offsets);
    const auto found = key ? kept_.find(*key) : kept_.end();
    if (found == kept_.end()) return false;
    const auto kept = found->second;  // another thread may drop it meanwhile
    void* const stream = reinterpret_cast<void*>(key->back());
    for (const Launch& launch : kept->launches) launch.run(stream, late);
    return true;
  }

  // Keeps launches that were just made, unless one is None, with `held`: tensors that they need and nobody
  // else keeps, allocated on the launches' stream.
  void keep(nb::list tensors, nb::handle offsets, const std::vector<std::optional<Launch>>& launches,
            std::vector<nb::object> held) {
    Kept made{{}, std::move(held), 0};
    for (const auto& launch : launches) {
      if (!launch) return;
      made.launches.push_back(*launch);
    }
    for (const auto& tensor : made.held) made.bytes += nb::cast<std::size_t>(tensor.attr("nbytes"));
    if (made.launches.empty()) return;
    driver_ = made.launches[0].driver();
    const auto key = key_of(tensors, offsets);
    if (!key) return;
    std::vector<std::shared_ptr<const Kept>> dropped;  // destroyed last, as that may run Python
    auto& place = kept_[*key];
    if (place) {
      bytes_ -= place->bytes;
      dropped.push_back(place);
    } else {
      order_.push_back(*key);
    }
    bytes_ += made.bytes;
    place = std::make_shared<const Kept>(std::move(made));
    while (order_.size() > 1 && (order_.size() > most_calls_ || bytes_ > most_bytes_)) {
      dropped.push_back(std::move(kept_.extract(order_.front()).mapped()));
      bytes_ -= dropped.back()->bytes;
      order_.pop_front();
    }
  }

 private:
  using Key = std::vector<std::int64_t>;
  struct Kept {
    std::vector<Launch> launches;
    std::vector<nb::object> held;
    std::size_t bytes;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      std::uint64_t h = 0;
      for (const auto number : key) h = (h ^ std::uint64_t(number)) * 0x9e3779b97f4a7c15, h ^= h >> 32;
      return h;
    }
  };

  // Returns the call's key, whose last number is the stream. Nothing if the call must not be repeated: in the
  // capture of a CUDA graph, in a thread without a context, and if a tensor is of another class or negated.
  std::optional<Key> key_of(nb::list tensors, nb::handle offsets) {
    void* const context = driver_.context();
    Key key;  // not a member: Python code runs in between
    key.reserve(8 * (nb::len(tensors) + 1));
    key.push_back(reinterpret_cast<std::intptr_t>(context));
    if (!context || !tensors_.describe(tensors, offsets, key) ||
        driver_.capturing(reinterpret_cast<void*>(key.back())))
      return std::nullopt;
    return key;
  }

  Tensors tensors_;
  const std::size_t most_calls_, most_bytes_;
  Driver driver_{};  // of the kept launches
  std::unordered_map<Key, std::shared_ptr<const Kept>, Hash> kept_;
  std::deque<Key> order_;  // oldest first
  std::size_t bytes_ = 0;
};

}  // namespace ringdp
