#include "account.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "channel.h"

namespace disco::interpose {
namespace {

constexpr double kSecond = 1e9;
constexpr double kDefaultWait = 2, kLongestWait = 600;
constexpr int kQuiet = 5;  // of its length no wait follows one that was in vain

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
std::atomic<pid_t> owner{0};  // whose memory this is; -1: being cleared

Channel channel;
Table table;
std::int64_t held[kDevices];
std::int64_t quiet_until[kDevices];
std::uint64_t primary[kDevices];
std::uint64_t objects = 0;
std::atomic<int> reserving{0};
std::int64_t longest_wait = static_cast<std::int64_t>(kDefaultWait * kSecond);

void start_anew() {
  channel.abandon();
  table.clear();
  std::memset(held, 0, sizeof(held));
  std::memset(quiet_until, 0, sizeof(quiet_until));
  std::memset(primary, 0, sizeof(primary));
  reserving.store(0);
}

void in_child() {
  start_anew();
  pthread_mutex_init(&lock, nullptr);
  owner.store(getpid());
}

__attribute__((constructor)) void start() {
  channel.configure(std::getenv("DISCO_STORE"));
  if (const char* const text = std::getenv("DISCO_STORE_WAIT")) {
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    if (end != text && *end == 0 && seconds >= 0 && seconds <= kLongestWait)
      longest_wait = static_cast<std::int64_t>(seconds * kSecond);
  }
  owner.store(getpid());
  pthread_atfork([] { pthread_mutex_lock(&lock); }, [] { pthread_mutex_unlock(&lock); }, &in_child);
}

// Holds the lock; leaves errno as it was, and lets nobody cancel the thread meanwhile.
class Locked {
 public:
  Locked() : errno_(errno) {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_);
    // Not every way to make a process runs the handlers of a fork.
    const pid_t self = getpid();
    for (pid_t known = owner.load(std::memory_order_acquire); known != self; known = owner.load()) {
      if (known == -1 || !owner.compare_exchange_strong(known, -1)) {
        sched_yield();
        continue;
      }
      in_child();
    }
    pthread_mutex_lock(&lock);
  }
  ~Locked() {
    pthread_mutex_unlock(&lock);
    pthread_setcancelstate(cancel_, nullptr);
    errno = errno_;
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  int errno_;
  int cancel_ = 0;
};

bool tell() { return channel.tell(held); }

void count(int device, std::uint64_t bytes, int sign) {
  if (device >= 0 && device < kDevices) held[device] += sign * static_cast<std::int64_t>(bytes);
}

void erase(Entry* entry) {
  if (entry->kind == Kind::kPool && entry->bytes != 0) reserving.fetch_sub(1);
  table.erase(entry);
}

void uncount(Entry* entry) {
  count(entry->device, entry->counted(), -1);
  erase(entry);
}

bool insert(const Entry& entry) {
  if (Entry* const stale = table.find(entry.kind, entry.key)) uncount(stale);
  if (table.insert(entry) == nullptr) return false;
  if (entry.kind == Kind::kPool && entry.bytes != 0) reserving.fetch_add(1);
  return true;
}

// Erase all for which `chosen` holds, and count them no more.
template <typename Chosen>
void uncount_all(Chosen chosen) {
  table.erase_if([&](const Entry& entry) {
    if (!chosen(entry)) return false;
    count(entry.device, entry.counted(), -1);
    if (entry.kind == Kind::kPool && entry.bytes != 0) reserving.fetch_sub(1);
    return true;
  });
}

// One reference of an object less; true if it was the last one, with the object in `gone`.
bool unreference(std::uint64_t id, Entry* gone) {
  Entry* const object = table.find(Kind::kObject, id);
  if (object == nullptr || --object->refs != 0) return false;
  *gone = *object;
  table.erase(object);
  return true;
}

// A handle or a mapping whose end was not seen: another one has its number or its address now.
void drop_stale(Kind kind, std::uint64_t key) {
  Entry* const stale = table.find(kind, key);
  if (stale == nullptr) return;
  const std::uint64_t object = stale->owner;
  table.erase(stale);
  Entry gone;
  if (unreference(object, &gone)) count(gone.device, gone.bytes, -1);
}

}  // namespace

Claim claim(int device, std::uint64_t bytes, std::uint64_t total) {
  if (device < 0 || device >= kDevices) return {};
  const Locked locked;
  const std::int64_t own = std::max<std::int64_t>(held[device], 0);
  const std::uint64_t most = total == 0 ? std::uint64_t{1} << 46 : total;
  if (bytes > most || own > static_cast<std::int64_t>(most - bytes)) return {device, 0, false};
  count(device, bytes, 1);
  return {device, bytes, tell()};
}

void withdraw(const Claim& claim) {
  if (claim.bytes == 0) return;
  const Locked locked;
  count(claim.device, claim.bytes, -1);
  tell();
}

void settle(const Claim& claim, Entry entry) {
  const Locked locked;
  count(claim.device, claim.bytes, -1);
  if (insert(entry)) count(entry.device, entry.counted(), 1);
  tell();
}

void settle_pool(const Claim& claim, std::uint64_t pool, int device, std::uint64_t reserved) {
  const Locked locked;
  count(claim.device, claim.bytes, -1);
  if (insert(
          {.kind = Kind::kPool, .device = static_cast<std::int16_t>(device), .key = pool, .bytes = reserved}))
    count(device, reserved, 1);
  tell();
}

bool take(Kind kind, std::uint64_t key, Entry* taken) {
  const Locked locked;
  Entry* const entry = table.find(kind, key);
  if (entry == nullptr) return false;
  *taken = *entry;
  erase(entry);
  return true;
}

void put_back(const Entry& entry) {
  const Locked locked;
  if (table.find(entry.kind, entry.key) != nullptr || !insert(entry))
    count(entry.device, entry.counted(), -1);
}

void freed(const Entry& entry) {
  const Locked locked;
  count(entry.device, entry.counted(), -1);
  tell();
}

void add_pool(std::uint64_t pool, int device) {
  const Locked locked;
  insert({.kind = Kind::kPool, .device = static_cast<std::int16_t>(device), .key = pool});
}

bool pool_device(std::uint64_t pool, int* device) {
  const Locked locked;
  const Entry* const known = table.find(Kind::kPool, pool);
  if (known == nullptr) return false;
  *device = known->device;
  return true;
}

void pool_gone(const Entry& pool) {
  const Locked locked;
  count(pool.device, pool.bytes, -1);
  table.each([&](Entry& entry) {
    if (entry.kind != Kind::kPointer || !entry.pooled || entry.owner != pool.key) return;
    entry.pooled = false;
    entry.owner = 0;
    count(entry.device, entry.bytes, 1);
  });
  tell();
}

bool pools_in_use() { return reserving.load(std::memory_order_relaxed) > 0; }

int reserving_pools(std::uint64_t* pools, int limit) {
  const Locked locked;
  int found = 0;
  table.each([&](Entry& entry) {
    if (entry.kind == Kind::kPool && entry.bytes != 0 && found < limit) pools[found++] = entry.key;
  });
  return found;
}

void settle_object(const Claim& claim, std::uint64_t handle, int device, std::uint64_t bytes) {
  const Locked locked;
  count(claim.device, claim.bytes, -1);
  drop_stale(Kind::kHandle, handle);
  const std::uint64_t id = ++objects;
  const Entry object{.kind = Kind::kObject,
                     .device = static_cast<std::int16_t>(device),
                     .refs = 1,
                     .key = id,
                     .bytes = bytes};
  if (insert(object) && insert({.kind = Kind::kHandle, .refs = 1, .key = handle, .owner = id}))
    count(device, bytes, 1);
  tell();
}

void add_mapping(std::uint64_t address, std::uint64_t bytes, std::uint64_t handle) {
  const Locked locked;
  drop_stale(Kind::kMapping, address);
  const Entry* const known = table.find(Kind::kHandle, handle);
  if (known == nullptr) return;
  const std::uint64_t id = known->owner;
  if (insert({.kind = Kind::kMapping, .key = address, .bytes = bytes, .owner = id}))
    ++table.find(Kind::kObject, id)->refs;
}

void add_handle(std::uint64_t address, std::uint64_t handle) {
  const Locked locked;
  const Entry* within = nullptr;
  table.each([&](Entry& entry) {
    if (entry.kind == Kind::kMapping && entry.key <= address && address - entry.key < entry.bytes)
      within = &entry;
  });
  if (within == nullptr) return;
  const std::uint64_t id = within->owner;
  if (Entry* const known = table.find(Kind::kHandle, handle)) {
    ++known->refs;
  } else if (insert({.kind = Kind::kHandle, .refs = 1, .key = handle, .owner = id})) {
    ++table.find(Kind::kObject, id)->refs;
  }
}

int drop_handle(std::uint64_t handle, Entry* gone) {
  const Locked locked;
  Entry* const known = table.find(Kind::kHandle, handle);
  if (known == nullptr || --known->refs != 0) return 0;
  const std::uint64_t id = known->owner;
  table.erase(known);
  return unreference(id, gone) ? 1 : 0;
}

int drop_mappings(std::uint64_t address, std::uint64_t bytes, Entry* gone, int limit) {
  const Locked locked;
  int found = 0;
  const auto drop = [&](Entry* mapping) {
    const std::uint64_t id = mapping->owner;
    table.erase(mapping);
    if (unreference(id, &gone[found])) ++found;
  };
  Entry* const exact = table.find(Kind::kMapping, address);
  if (exact != nullptr && exact->bytes == bytes) {
    drop(exact);
    return found;
  }
  while (found < limit) {
    Entry* within = nullptr;
    table.each([&](Entry& entry) {
      if (entry.kind == Kind::kMapping && entry.key >= address && entry.key - address < bytes)
        within = &entry;
    });
    if (within == nullptr) break;
    drop(within);
  }
  return found;
}

void primary_context(int device, std::uint64_t context) {
  if (device < 0 || device >= kDevices) return;
  const Locked locked;
  primary[device] = context;
}

void device_reset(int device) {
  if (device < 0 || device >= kDevices) return;
  const Locked locked;
  const std::uint64_t context = primary[device];
  uncount_all([&](const Entry& entry) {
    if (entry.device != device || entry.kind >= Kind::kObject) return false;
    if (entry.kind == Kind::kPool || entry.pooled) return true;
    return entry.owner == 0 || context == 0 || entry.owner == context;
  });
  tell();
}

void context_gone(std::uint64_t context) {
  const Locked locked;
  uncount_all([&](const Entry& entry) {
    return entry.owner == context && !entry.pooled && entry.kind >= Kind::kPointer &&
           entry.kind <= Kind::kMipmap;
  });
  tell();
}

std::int64_t patience(const Claim& claim) {
  if (!claim.heard) return 0;
  const Locked locked;
  return now() < quiet_until[claim.device] ? 0 : longest_wait;
}

void waited_in_vain(const Claim& claim) {
  const Locked locked;
  quiet_until[claim.device] = now() + kQuiet * longest_wait;
}

bool store_listens() {
  const Locked locked;
  return channel.alive();
}

}  // namespace disco::interpose
