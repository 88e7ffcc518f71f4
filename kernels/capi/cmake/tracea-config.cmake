# find_package(tracea): the target tracea::tracea, which stays right wherever the files are
# moved together.
#
#     find_package(tracea REQUIRED)      # -Dtracea_DIR=$(tracea config --cmakedir)
#     target_link_libraries(program PRIVATE tracea::tracea)
get_filename_component(_tracea_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET tracea::tracea)
  add_library(tracea::tracea SHARED IMPORTED)
  set_target_properties(tracea::tracea PROPERTIES
    IMPORTED_LOCATION "${_tracea_prefix}/lib/libtracea.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_tracea_prefix}/include")
endif()
unset(_tracea_prefix)
