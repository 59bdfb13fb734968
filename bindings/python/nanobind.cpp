// nanobind's own sources, all in one, as they come with the installed package.
#include <nb_combined.cpp>
