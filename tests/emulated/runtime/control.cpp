// What tests ask and order: the functions of emulated.h that are not part of something else.
#include <algorithm>
#include <cstring>

#include "calls.h"
#include "emulated.h"
#include "faults.h"
#include "journal.h"

using namespace emulated;

namespace {

std::size_t write_out(const std::string& from, char* text, std::size_t room) {
  if (text != nullptr && room != 0) {
    const std::size_t length = std::min(from.size(), room - 1);
    std::memcpy(text, from.data(), length);
    text[length] = '\0';
  }
  return from.size() + 1;
}

}  // namespace

extern "C" {

void emuCount(const char* what) { journal().count(what); }
void emuComplain(const char* text) { journal().complain(text); }
std::size_t emuCounts(char* text, std::size_t room) { return write_out(journal().counts(), text, room); }
std::size_t emuComplaints(char* text, std::size_t room) {
  return write_out(journal().complaints(), text, room);
}
void emuReset() { journal().reset(); }
int emuHasContext(int device) { return has_context(device) ? 1 : 0; }
void emuArm(const char* text, long nth, int code) { faults().arm(text, nth, code); }
int emuHanging() { return faults().hanging(); }
void emuRelease() { faults().release(); }
}
