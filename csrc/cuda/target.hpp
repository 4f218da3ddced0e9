// What differs between a GPU's block and host threads: barriers, flag accesses and the clock. All else
// is one source for nvcc and g++, so that ThreadSanitizer can check the protocol that the GPU runs.
#pragma once

#include "../apply.hpp"

#if !defined(__CUDACC__)
#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <thread>
#endif

#if defined(__CUDACC__)
#define RINGDP_UNROLL _Pragma("unroll")
#else
#define RINGDP_UNROLL
#endif

namespace ringdp {

using u64 = unsigned long long;
using i64 = long long;

// The threads that share one channel's work.
struct Team {
  int thread, threads;
#if defined(__CUDACC__)
  __device__ void meet() const { __syncthreads(); }
#else
  pthread_barrier_t* barrier;
  void meet() const { pthread_barrier_wait(barrier); }
#endif
};

// relaxed: only for polling; an acquire always follows before what the flag guards is read
RINGDP_DEVICE inline u64 load_relaxed(const u64* flag) {
#if defined(__CUDA_ARCH__)
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_RELAXED);
#endif
}

// acquire, at system scope: what a peer's GPU wrote before its release is visible after this load
RINGDP_DEVICE inline u64 load_acquire(const u64* flag) {
#if defined(__CUDA_ARCH__)
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}

// release, at system scope: ordered after all writes of this thread, and after those of its team up
// to their last barrier, which makes them happen before this store
RINGDP_DEVICE inline void store_release(u64* flag, u64 value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

// Stores `value` if the flag is 0, so that the first failure is the one reported.
RINGDP_DEVICE inline void store_first(u64* flag, u64 value) {
#if defined(__CUDA_ARCH__)
  atomicCAS_system(flag, 0ull, value);
#else
  u64 none = 0;
  __atomic_compare_exchange_n(flag, &none, value, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
#endif
}

RINGDP_DEVICE inline u64 nanoseconds() {
#if defined(__CUDA_ARCH__)
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#elif defined(__CUDACC__)
  return 0;  // nvcc's host pass, which never calls this
#else
  return u64(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// Pauses between two polls of a flag. On the host, threads outnumber cores, so they soon sleep.
RINGDP_DEVICE inline void pause([[maybe_unused]] unsigned looks) {
#if defined(__CUDA_ARCH__)
  __nanosleep(20);
#elif !defined(__CUDACC__)
  if (looks < 64)
    sched_yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(20));
#endif
}

}  // namespace ringdp
