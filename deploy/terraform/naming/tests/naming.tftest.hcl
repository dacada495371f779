variables {
  project = "my-project"
  region  = "europe-west4"
  image   = "europe-docker.pkg.dev/my-project/images/tensorferry:0.1.0"
}

run "names" {
  command = plan

  assert {
    condition     = output.bucket == "my-project-tensorferry"
    error_message = "bucket is ${output.bucket}"
  }

  assert {
    condition     = output.account_id == "tensorferry-worker"
    error_message = "account is ${output.account_id}"
  }

  assert {
    condition     = output.template.defaultEnvironment.tempLocation == "gs://my-project-tensorferry/tmp"
    error_message = "temp location is ${output.template.defaultEnvironment.tempLocation}"
  }

  assert {
    condition     = output.template.defaultEnvironment.sdkContainerImage == output.template.image
    error_message = "workers would not run the template's image"
  }

  assert {
    condition     = output.repositories == { images = { location = "europe", project = "my-project" } }
    error_message = "repositories are ${jsonencode(output.repositories)}"
  }
}

run "another_registry_needs_no_role" {
  command = plan

  variables {
    image = "registry.example.com/tensorferry:0.1.0"
  }

  assert {
    condition     = length(output.repositories) == 0
    error_message = "repositories are ${jsonencode(output.repositories)}"
  }
}

run "refuses_a_zone" {
  command = plan

  variables {
    region = "europe-west4-a"
  }

  expect_failures = [var.region]
}

run "refuses_latest" {
  command = plan

  variables {
    image = "europe-docker.pkg.dev/my-project/images/tensorferry:latest"
  }

  expect_failures = [var.image]
}

run "refuses_an_image_without_a_tag" {
  command = plan

  variables {
    image = "europe-docker.pkg.dev/my-project/images/tensorferry"
  }

  expect_failures = [var.image]
}

run "refuses_a_long_name" {
  command = plan

  variables {
    name = "tensorferry-for-everybody"
  }

  expect_failures = [var.name]
}
