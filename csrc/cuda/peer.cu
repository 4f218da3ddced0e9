// The kernels: grid (1, channels, ranks in this launch), one block each. The launch is cooperative:
// blocks wait for one another, so either all are resident or the driver refuses the launch. One block
// fits a multiprocessor. Two of 256 threads, one of which moves data while the leader of the other
// waits, are slower: 422 GB/s against 467 [measured: H200, all multiprocessors, busbw of 2 ranks].
#include "rows.hpp"

namespace ringdp {

template <class T>
__device__ void rows(const Job* jobs, const Given& given) {
  extern __shared__ __align__(16) char memory[];
  run_rows<T>({int(threadIdx.x), int(blockDim.x)}, jobs[blockIdx.z], given, blockIdx.y, memory);
}

}  // namespace ringdp

#define RINGDP_KERNEL(name, T)                                                     \
  extern "C" __global__ void __launch_bounds__(512, 1) rows_##name(                \
      const ringdp::Job* jobs, char* buffer, char* room, ringdp::i64 number) {     \
    ringdp::rows<T>(jobs, {buffer, room, number});                                 \
  }
RINGDP_EACH_DTYPE(RINGDP_KERNEL)
