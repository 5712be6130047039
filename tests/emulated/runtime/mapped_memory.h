// Device memory that is created apart from its address and shared with other processes: a file in memory,
// mapped where the bytes of its address are kept. The functions are the driver's (driver/memory.cpp), whose
// error codes they answer.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

std::size_t emuVmGrain();
int emuVmCreate(std::uint64_t* handle, std::size_t bytes, int device);
int emuVmRelease(std::uint64_t handle);
int emuVmExport(int* file, std::uint64_t handle);
int emuVmImport(std::uint64_t* handle, int file);
int emuVmReserve(char** address, std::size_t bytes);
int emuVmFree(char* address, std::size_t bytes);
int emuVmMap(char* address, std::size_t bytes, std::uint64_t handle);
// `access`: 0 none, 1 read, 3 read and write.
int emuVmSetAccess(char* address, std::size_t bytes, int device, int access);
int emuVmGetAccess(unsigned long long* access, int device, const char* address);
int emuVmUnmap(char* address, std::size_t bytes);
}
