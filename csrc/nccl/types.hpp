// NCCL's C types and constants, as documented for its API, as far as a caller over host memory needs them.
#pragma once

#include <cstddef>

#include "../combine.hpp"

#define RINGDP_API extern "C" __attribute__((visibility("default")))

enum ncclResult_t {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
};

constexpr int kVersion = 22707;  // 2.27.7, whose API this has

struct ncclUniqueId {
  char internal[128];
};

// The first fields; those after them tune GPUs.
struct ncclConfig_t {
  std::size_t size;
  unsigned int magic, version;
  int blocking;
};
constexpr unsigned kConfigMagic = 0xcafebeef;

enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };

enum ncclDataType_t {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2,
};

namespace hostnccl {

// Returns the bytes of an element, or 0 if there is no such type.
inline std::size_t size_of(ncclDataType_t type) {
  constexpr std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type > ncclFloat8e5m2 ? 0 : sizes[type];
}

// By type: its index in transport.base.DTYPES, or -1 if no sums of it are needed.
constexpr int kDtypes[] = {4, 5, 6, -1, 7, -1, 2, 0, 1, 3, -1, -1};

inline bool reduces(ncclDataType_t type, ncclRedOp_t op) {
  return size_of(type) && kDtypes[type] >= 0 && op >= 0 && op <= ncclAvg;
}

inline ringdp::Dtype arithmetic(ncclDataType_t type, ncclRedOp_t op) {
  using ringdp::Op;
  constexpr Op ops[] = {Op::sum, Op::prod, Op::max, Op::min, Op::avg};
  return ringdp::dtype(kDtypes[type], int(ops[op]));
}

}  // namespace hostnccl
