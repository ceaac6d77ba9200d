// The binding library itself, compiled as one source, so that the extension builds without CMake.
#include "nb_combined.cpp"
