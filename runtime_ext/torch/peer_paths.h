// Which GPUs of this machine copy straight to each other, tried once in a process.
#pragma once

#include <c10/core/Device.h>

#include "../core/peer_copies.h"

namespace disco {

// How bytes get from one GPU to another of PyTorch's, tried in memory of its allocator at the first call for
// the pair. Throws CudaError, and c10::Error where there is no memory.
PeerPath peer_path(c10::Device from, c10::Device to);

}  // namespace disco
