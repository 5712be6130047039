#include "workspace.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

namespace disco {
namespace {

thread_local Workspace* scope = nullptr;
thread_local Workspace* watched = nullptr;
thread_local std::uint64_t watched_seen = 0;

// Leaked on purpose: PyTorch's table gives its blocks back during static destruction.
struct Table {
  std::mutex mutex;
  std::map<const void*, std::unique_ptr<Workspace>> by_stream;
};
Table& table() {
  static auto* made = new Table;
  return *made;
}

}  // namespace

Workspace& Workspace::of(const void* stream) {
  const std::lock_guard lock(table().mutex);
  std::unique_ptr<Workspace>& entry = table().by_stream[stream];
  if (entry == nullptr) entry = std::make_unique<Workspace>();
  return *entry;
}

void Workspace::release_unused() {
  const std::lock_guard lock(table().mutex);
  for (const auto& [stream, workspace] : table().by_stream) {
    const std::lock_guard pieces(workspace->mutex_);
    if (workspace->holders_ > 0) continue;
    workspace->release_asked_ = workspace->kept_ > 0;
    if (workspace->kept_ == 0) workspace->pieces_.clear();
  }
}

void Workspace::keep(bool on) {
  const std::lock_guard lock(mutex_);
  kept_ += on ? 1 : -1;
  if (kept_ == 0 && holders_ == 0 && std::exchange(release_asked_, false)) pieces_.clear();
}

void Workspace::watch(std::uint64_t seen) {
  watched = this;
  watched_seen = seen;
}

Workspace* Workspace::cleared(std::size_t nbytes) {
  if (watched == nullptr || watched->returned() == watched_seen) return nullptr;
  const std::lock_guard lock(watched->mutex_);
  const auto fits = [nbytes](const Piece& piece) { return piece.nbytes == nbytes; };
  return std::any_of(watched->pieces_.begin(), watched->pieces_.end(), fits) ? watched : nullptr;
}

void Workspace::give_back(void* workspace) {
  auto* const self = static_cast<Workspace*>(workspace);
  const std::lock_guard lock(self->mutex_);
  --self->holders_;
  self->returned_.fetch_add(1, std::memory_order_release);
}

WorkspaceScope::WorkspaceScope(Workspace& workspace) { scope = &workspace; }
WorkspaceScope::~WorkspaceScope() { scope = nullptr; }
Workspace* WorkspaceScope::current() { return scope; }

}  // namespace disco
