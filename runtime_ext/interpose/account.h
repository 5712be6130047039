// What this process holds, and what the store knows of it. All of it is safe in any thread, and starts anew
// in the child of a fork, which has none of its parent's device memory.
#pragma once
#include <cstdint>

#include "table.h"

namespace disco::interpose {

// Bytes that an allocation asks for, told to the store before it is made.
struct Claim {
  int device = -1;  // -1: nothing is told or counted
  std::uint64_t bytes = 0;
  bool heard = false;  // the store can make room
};

// Tell the store. `total`: the device's memory, 0 if unknown. More than what is left of that besides what
// this process holds itself is no reason for others to make room: the claim is then of no bytes.
Claim claim(int device, std::uint64_t bytes, std::uint64_t total);

// The claim has come to nothing.
void withdraw(const Claim& claim);

// The claim has become `entry`. One of its kind and key that is still there is gone: the call that freed it
// was not seen.
void settle(const Claim& claim, Entry entry);

// The claim is part of what `pool` has reserved, `reserved` bytes on `device` in all.
void settle_pool(const Claim& claim, std::uint64_t pool, int device, std::uint64_t reserved);

// Take an entry out before CUDA is asked to free it: from then on another thread may get its address. Its
// bytes count until `freed`. False: there is none.
bool take(Kind kind, std::uint64_t key, Entry* taken);
void put_back(const Entry& entry);
void freed(const Entry& entry);

// A pool is known, by its device; -1: on none.
void add_pool(std::uint64_t pool, int device);
// The device of a pool in `device`, if it is known.
bool pool_device(std::uint64_t pool, int* device);
// A pool that was taken is gone; what it has given out counts by itself from now on.
void pool_gone(const Entry& pool);
// Whether any pool has reserved memory; without a lock.
bool pools_in_use();
// The pools that have: at most `limit`, written to `pools`.
int reserving_pools(std::uint64_t* pools, int limit);

// Physical memory.
void settle_object(const Claim& claim, std::uint64_t handle, int device, std::uint64_t bytes);
void add_mapping(std::uint64_t address, std::uint64_t bytes, std::uint64_t handle);
void add_handle(std::uint64_t address, std::uint64_t handle);
// One release of a handle, or all mappings within a range, each before it happens: the objects that go are in
// `gone`.
int drop_handle(std::uint64_t handle, Entry* gone);
int drop_mappings(std::uint64_t address, std::uint64_t bytes, Entry* gone, int limit);

// All linear memory, arrays and pools of a device (of a context, unless 0) are gone.
void device_reset(int device);
void context_gone(std::uint64_t context);
void primary_context(int device, std::uint64_t context);

// How long an allocation that fails for want of memory on `device` may wait, in nanoseconds: nothing while
// the last such wait was for nothing.
std::int64_t patience(const Claim& claim);
void waited_in_vain(const Claim& claim);
// Whether the store is still there.
bool store_listens();

}  // namespace disco::interpose
